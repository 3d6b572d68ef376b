"""What a step gives, takes back and remembers."""

import contextlib
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import NewDisposeScope
from tenure.adaptive import (
    AdaptiveUsageError,
    NoBatchsizeCache,
    OutOfRetriesError,
    reset,
    step,
)

from ..attempt.failures import out_of_memory_above
from ..unchanged import unchanged
from .step_cases import gradients, samples, small_net, squares, wanted_of, worst_error


def fitting(net, most):
    """A mean that runs out of memory above some samples."""
    check = out_of_memory_above(most)
    return lambda b: check(len(b)) or squares(net)(b)


# --- results and retries


def test_the_result_tells_the_loss_its_terms_and_the_split():
    net, x, check = small_net(), samples(), out_of_memory_above(4)

    def fn(b):
        check(len(b))
        out = net(b)
        return {"size": (out.square().sum(), out.numel()), "sum": (out.sum(), len(b))}

    events = []
    result = step(fn, x, on_retry=events.append)
    out = net(x).detach()
    assert (result.micro_batch, result.sizes, result.attempts) == (4, (4, 3, 2), 2)
    torch.testing.assert_close(result.terms["size"], out.square().mean())
    torch.testing.assert_close(result.terms["sum"], out.sum() / 9)
    torch.testing.assert_close(result.loss, result.terms["size"] + result.terms["sum"])
    assert not result.loss.requires_grad
    assert list(result.terms) == ["size", "sum"]
    (event,) = events
    assert (event.kind, event.unit, event.size, event.next_size) == ("shrink", "micro-batch", 9, 4)
    shown = f"<StepResult: loss {result.loss.item():.4g}, 9 samples, micro-batch 4, 2 attempts>"
    assert repr(result) == shown
    other = pickle.loads(pickle.dumps(result))
    assert torch.equal(other.loss, result.loss)
    assert other.terms == result.terms
    assert (other.micro_batch, other.sizes, other.attempts) == (4, (4, 3, 2), 2)
    with pytest.raises(TypeError):
        other.terms["other"] = out


@pytest.mark.parametrize("most", [9, 4])
def test_the_terms_that_a_function_of_them_got_are_its_own(most):
    net, kept = small_net(), []

    def then(terms):
        kept.append(terms)
        return terms["size"]

    result = step(lambda b: {"size": net(b).square().mean()}, samples(), then=then, maximum=most)
    kept[-1].clear()
    assert list(result.terms) == ["size"]


def test_minimum_and_maximum_bound_the_micro_batch():
    net, sizes = small_net(), []
    fits = fitting(net, 2)

    def fn(b):
        sizes.append(len(b))
        return fits(b)

    with pytest.raises(OutOfRetriesError, match=r"'fn' ran out of .*micro-batch 12, 6, 3"):
        step(fn, samples(16), minimum=3, maximum=12, verify=False)
    assert sizes == [12, 6, 3]
    assert net[0].weight.grad is None


def test_an_error_of_the_function_goes_on_and_leaves_everything_as_it_was():
    net, x = small_net(), samples()
    net[0].weight.grad = torch.ones(8, 4, dtype=torch.float64)

    def fn(b):
        torch.rand(3)
        if b[0, 0] == x[7, 0]:
            raise ZeroDivisionError("by the user")
        return net(b).square().mean()

    with unchanged(net), pytest.raises(ZeroDivisionError, match="by the user"):
        step(fn, x, maximum=4)


@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_a_hook_that_fails_as_gradients_are_delivered_counts_no_buffer_twice(error):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    errors = [error("out of memory")]

    def hook(gradient):
        if errors:
            raise errors.pop()

    net[0].weight.register_hook(hook)
    is_oom = error is torch.OutOfMemoryError
    with contextlib.nullcontext() if is_oom else pytest.raises(error):
        step(lambda b: net(b).square().mean(), torch.randn(8, 4), maximum=4, batchnorm="per_chunk")
    assert net[1].num_batches_tracked == (4 if is_oom else 0)
    assert is_oom or torch.equal(net[1].running_mean, torch.zeros(8))


@pytest.mark.parametrize("way", ["retry", "outputs", "terms", "once"])
def test_a_function_that_would_write_into_the_batch_twice_is_refused(way):
    net, x = small_net(), {"x": samples(8), "n": 8}
    fits = out_of_memory_above(2)

    def fn(batch):
        batch["x"].div_(2)
        if way == "retry":
            fits(len(batch["x"]))
        out = net(batch["x"])
        if way == "terms":
            return {"sum": (out.sum(), len(out)), "square": (out.square().sum(), out.numel())}
        return out if way == "outputs" else out.sum()

    options = {
        "retry": {"loss": "sum"},
        "outputs": {"loss": lambda o: o.std(), "maximum": 3},
        "terms": {"maximum": 3},
        "once": {"loss": "sum", "maximum": 2},
    }[way] | {"in_dims": {"x": 0, "n": None}, "verify": False}
    if way == "once":
        assert step(fn, x, **options).sizes == (2, 2, 2, 2)
        return
    told = r"has written into float64\[8, 4\] on cpu, 256 B of the batch twice,"
    with pytest.raises(AdaptiveUsageError, match=told):
        step(fn, x, **options)
    assert net[0].weight.grad is None


def test_a_write_that_is_the_same_twice_is_none():
    net, fits = small_net(), out_of_memory_above(2)

    def fn(b):
        b["labels"][b["labels"] == 2] = -100
        fits(len(b["x"]))
        return F.cross_entropy(net(b["x"]), b["labels"])

    batch = {"x": samples(8), "labels": torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])}
    counted = {"weight": lambda b: (b["labels"].abs() < 2).sum()}
    result = step(fn, batch, **counted)
    assert result.sizes == (2, 2, 2, 2)
    got, kept = gradients(net), batch["labels"] >= 0
    net.zero_grad()
    wanted = wanted_of(net, F.cross_entropy(net(batch["x"][kept]), batch["labels"][kept]))
    assert worst_error(got, wanted) < 1e-10


def test_an_empty_batch_does_what_the_plain_call_does():
    net = small_net()
    result = step(squares(net), samples(0))
    assert result.loss.isnan()
    assert result.sizes == (0,)
    step(lambda b: net(b).sum(), samples(0), loss="sum")


def test_steps_in_a_scope_leave_their_gradients_and_their_loss():
    net = small_net()
    with NewDisposeScope() as scope:
        result = step(lambda b: (net(b).sum(), len(b)), samples(), maximum=4)
        kept = scope.move_to_outer(result.loss)
    assert float(kept) == float(kept)
    net[0].weight.grad.add_(1)


# --- what is returned beside the loss


def test_what_is_returned_beside_the_loss_comes_back_for_each_micro_batch():
    net = nn.Sequential(small_net(), nn.Dropout())
    x, seen = samples(10), []

    def loss_of(x):
        out = net(x)
        seen.append(len(x))
        out_of_memory_above(4)(len(x))
        return out.square().mean(), (len(x), out.detach())

    result = step(loss_of, x, cache_type=NoBatchsizeCache, has_aux=True)
    assert max(seen) == 10
    assert tuple(n for n, _ in result.aux) == result.sizes
    losses = [out.square().mean() * n / 10 for n, out in result.aux]
    torch.testing.assert_close(sum(losses), result.loss)
    # two passes give that of each micro-batch once, and a batch that fits gives one
    result = step(lambda x: (net(x), x), x, loss=lambda out: out.std(), maximum=4, has_aux=True)
    assert torch.equal(torch.cat(result.aux), x)
    assert step(lambda x: (net(x).mean(), "told"), x, has_aux=True).aux == ("told",)
    with pytest.raises(AdaptiveUsageError, match=r"has_aux=True was asked for\. Return a pair"):
        step(lambda x: net(x).mean(), x, has_aux=True)


# --- what is remembered


def test_the_size_that_fitted_is_remembered_for_the_call_its_context_and_no_cache():
    x = samples(16)

    def train(n_steps, **options):
        fn = fitting(small_net(), 4)
        return [step(fn, x, verify=False, **options).attempts for _ in range(n_steps)]

    assert train(3) == [3, 1, 1]
    assert train(2) == [1, 1]
    reset()
    assert train(2, cache_type=NoBatchsizeCache) == [3, 3]
    assert train(2, context="training") == [3, 1]
    assert train(1, context="evaluation") == [3]


def test_nothing_that_is_remembered_or_failed_keeps_the_model_alive(no_gc):
    for most in (4, 0):
        net = small_net()
        with contextlib.suppress(OutOfRetriesError):
            step(fitting(net, most), samples(16))
        gone = weakref.ref(net)
        del net
        assert gone() is None
    reset()
