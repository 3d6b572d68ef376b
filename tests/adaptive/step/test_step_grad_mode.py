"""Gradients are on again after an interrupt, wherever it came."""

import sys

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, step


class _Interrupting:
    """Interrupts the n-th end of a ``no_grad``, before it has set gradients back."""

    def __init__(self, n):
        self.n_left = n

    def __call__(self, frame, event, arg):
        if frame.f_code is torch.no_grad.__exit__.__code__:
            self.n_left -= 1
            if self.n_left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt


@pytest.mark.parametrize("fits", [True, False])
def test_an_interrupt_in_the_end_of_no_grad_leaves_gradients_on(fits):
    net, x = nn.Linear(4, 3), torch.randn(24, 4)

    def outputs(batch):
        if len(batch) > 8 and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return net(batch)

    before, n, is_interrupted = sys.gettrace(), 0, True
    while is_interrupted:
        sys.settrace(_Interrupting(n))
        try:
            step(
                outputs, x, loss=lambda out: out.logsumexp(0).mean(), verify=False,
                cache_type=NoBatchsizeCache, maximum=12 if fits else 24,
            )  # fmt: skip
            is_interrupted = False
        except KeyboardInterrupt:
            n += 1
        finally:
            sys.settrace(before)
        assert torch.is_grad_enabled(), n
    # so many blocks without gradients end in a step
    assert n > 2
