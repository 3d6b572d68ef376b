"""A split that changes a loss is refused before it delivers; every other one is left alone."""

import random

import pytest
import torch

from tenure.adaptive import NoBatchsizeCache, SplitMismatchError, step

from ...attempt.failures import out_of_memory_above
from .verify_cases import RIGHT, WRONG


def traces(net):
    """All that a step might leave."""
    import numpy

    return [
        *[None if p.grad is None else p.grad.clone() for p in net.parameters()],
        *[b.clone() for b in net.buffers()],
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        [m.training for m in net.modules()],
    ]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def prepared(case):
    import numpy

    fn, batch, options = case()
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    return fn, batch, options, options["model"]


def running_out_above(fn, most):
    check = out_of_memory_above(most)

    def fitting(batch):
        check(len(batch["x"]))
        return fn(batch)

    return fitting


def each_by_one_and_some_by(other, one, names):
    """All cases one way; the other way verifies the same: a few of them, and the rest slowly."""
    few = [pytest.param(name, other) for name in list(names)[::10]]
    rest = [pytest.param(name, other, marks=pytest.mark.slow) for name in names]
    return [*[(name, one) for name in names], *few, *[r for i, r in enumerate(rest) if i % 10]]


@pytest.mark.parametrize(("name", "forcing"), each_by_one_and_some_by("memory", "maximum", WRONG))
def test_a_loss_that_a_split_changes_is_refused_and_leaves_no_trace(name, forcing):
    fn, batch, options, net = prepared(WRONG[name])
    for p in list(net.parameters())[1:]:
        p.grad = torch.ones_like(p)
    before = traces(net)
    if forcing == "maximum":
        options["maximum"] = 8
    else:
        fn = running_out_above(fn, 8)
    with pytest.raises(SplitMismatchError, match="would give other results then") as caught:
        step(fn, batch, cache_type=NoBatchsizeCache, **options)
    assert caught.value.whole != caught.value.split
    assert caught.value.advice
    assert caught.value.advice in str(caught.value)
    assert same(traces(net), before)


@pytest.mark.parametrize(("name", "maximum"), each_by_one_and_some_by(1, 8, RIGHT))
def test_a_loss_that_a_split_leaves_alone_has_what_it_has_without_verification(name, maximum):
    left = []
    for verify in (False, True):
        fn, batch, options, net = prepared(RIGHT[name])
        if maximum == 1 and "batchnorm" in options:
            return
        result = step(
            fn, batch, maximum=maximum, verify=verify, cache_type=NoBatchsizeCache, **options
        )
        left.append((traces(net), result.loss, result.sizes))
    assert len(left[0][2]) > 1
    assert left[0][2] == left[1][2]
    for a, b in zip(left[0][0], left[1][0], strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b
    torch.testing.assert_close(left[0][1], left[1][1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(10))
def test_mixing_by_numpys_numbers_is_refused_whatever_the_seed(seed):
    import numpy

    fn, batch, options, _ = prepared(WRONG["mixup with NumPy"])
    numpy.random.seed(seed)
    with pytest.raises(SplitMismatchError):
        step(fn, batch, maximum=8, cache_type=NoBatchsizeCache, **options)
