"""What calls that fail or only ask leave as it was."""

import contextlib
import random

import numpy as np
import torch


def traces(model):
    """All that a call might change of a model and of what draws random numbers."""
    return [
        *[p.detach().clone() for p in model.parameters()],
        *[None if p.grad is None else p.grad.clone() for p in model.parameters()],
        *[b.clone() for b in model.buffers()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [m.training for m in model.modules()],
        [set(vars(m)) for m in model.modules()],
    ]


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


@contextlib.contextmanager
def unchanged(model):
    """A block after which all of a model is as it was, with the same objects as gradients."""
    before, objects = traces(model), [p.grad for p in model.parameters()]
    yield
    assert_same(traces(model), before)
    assert all(p.grad is each for p, each in zip(model.parameters(), objects, strict=True))
