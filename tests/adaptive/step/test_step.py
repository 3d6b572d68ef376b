"""What a step gives, takes back and remembers."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import NewDisposeScope
from tenure.adaptive import (
    AdaptiveUsageWarning,
    NoBatchsizeCache,
    OutOfRetriesError,
    StepResult,
    memory_budget,
    reset,
    step,
)

from ..attempt.failures import out_of_memory_above
from .step_cases import samples, small_net

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
    assert isinstance(result, StepResult)
    assert (result.micro_batch, result.sizes, result.attempts) == (4, (4, 3, 2), 2)
    torch.testing.assert_close(result.terms["size"], out.square().mean())
    torch.testing.assert_close(result.terms["sum"], out.sum() / 9)
    torch.testing.assert_close(result.loss, result.terms["size"] + result.terms["sum"])
    assert not result.loss.requires_grad
    assert list(result.terms) == ["size", "sum"]
    assert [(e.kind, e.unit, e.size, e.next_size) for e in events] == [
        ("shrink", "micro-batch", 9, 4)
    ]
    with pytest.raises(TypeError):
        result.terms["other"] = out
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.loss = out


def test_a_result_prints_itself_in_one_line_however_large_what_it_has():
    net = small_net()
    result = step(lambda b: (net(b).square().mean(), net(b)), samples(), maximum=4, has_aux=True)
    assert repr(result) == (
        f"<StepResult: loss {result.loss.item():.4g}, 9 samples, micro-batch 4, 1 attempt>"
    )
    parts = tuple(torch.ones(1000) for _ in range(9))
    large = StepResult(torch.tensor(-1.2345e-10), {}, 125_000, (1,) * 999, 12, parts, 1_000_000)
    assert len(repr(large)) <= 80


def test_a_result_without_a_value_prints_itself_all_the_same():
    with NewDisposeScope():
        loss = torch.ones(())
    assert repr(StepResult(loss, {}, 1, (1,), 1)).startswith("<StepResult: loss disposed, ")
    meta = torch.ones((), device="meta")
    assert repr(StepResult(meta, {}, 1, (1,), 1)).startswith("<StepResult: loss without data, ")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_result_can_be_copied_and_pickled(copied):
    net = small_net()
    result = step(lambda b: {"size": net(b).square().mean()}, samples(), maximum=4)
    other = copied(result)
    assert isinstance(other, StepResult)
    assert torch.equal(other.loss, result.loss)
    assert other.terms == result.terms
    assert (other.micro_batch, other.sizes, other.attempts) == (4, (4, 3, 2), 1)
    with pytest.raises(TypeError):
        other.terms["other"] = other.loss


def test_minimum_and_maximum_bound_the_micro_batch():
    net, x, check = small_net(), samples(16), out_of_memory_above(2)
    sizes = []

    def fn(b):
        sizes.append(len(b))
        check(len(b))
        return net(b).square().mean()

    with pytest.raises(OutOfRetriesError, match=r"'fn' ran out of .*micro-batch 12, 6, 3"):
        step(fn, x, minimum=3, maximum=12, verify=False)
    assert sizes == [12, 6, 3]
    assert net[0].weight.grad is None


def test_an_error_of_the_function_goes_on_and_leaves_everything_as_it_was():
    net, x = small_net(), samples()
    net[0].weight.grad = prior = torch.ones(8, 4, dtype=torch.float64)
    state = torch.get_rng_state()

    def fn(b):
        torch.rand(3)
        if b[0, 0] == x[7, 0]:
            raise ZeroDivisionError("by the user")
        return net(b).square().mean()

    with pytest.raises(ZeroDivisionError, match="by the user"):
        step(fn, x, maximum=4)
    assert net[0].weight.grad is prior
    assert torch.equal(prior, torch.ones_like(prior))
    assert net[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hook_that_fails_as_gradients_are_delivered_leaves_buffers_as_they_were():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

    def hook(gradient):
        raise ZeroDivisionError("by the hook")

    net[0].weight.register_hook(hook)
    with pytest.raises(ZeroDivisionError, match="by the hook"):
        step(lambda b: net(b).square().mean(), torch.randn(8, 4), maximum=4, batchnorm="per_chunk")
    assert net[1].num_batches_tracked == 0
    assert torch.equal(net[1].running_mean, torch.zeros(8))


def test_memory_that_runs_out_as_gradients_are_delivered_counts_no_buffer_twice():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    checks = [out_of_memory_above(0), out_of_memory_above(1)]
    net[0].weight.register_hook(lambda gradient: checks.pop(0)(1))
    result = step(
        lambda b: net(b).square().mean(), torch.randn(8, 4), maximum=4, batchnorm="per_chunk"
    )
    assert result.sizes == (2, 2, 2, 2)
    assert net[1].num_batches_tracked == 4


def test_random_numbers_depend_on_the_seed_and_the_final_split_alone():
    def run(maximum, limit):
        net = small_net()
        check = out_of_memory_above(limit)

        def fn(b):
            out = F.dropout(net(F.dropout(b, 0.3)), 0.5)
            check(len(b))
            return out.square().mean()

        torch.manual_seed(3)
        result = step(fn, x, maximum=maximum)
        return result, net[0].weight.grad, torch.get_rng_state()

    x = samples(8)
    direct, direct_gradient, direct_state = run(2, 8)
    after_failures, gradient, state = run(None, 2)
    assert (direct.attempts, after_failures.attempts) == (1, 3)
    assert torch.equal(direct.loss, after_failures.loss)
    assert torch.equal(direct_gradient, gradient)
    assert torch.equal(direct_state, state)


@pytest.mark.parametrize("way", ["outputs", "terms"])
def test_two_passes_draw_random_numbers_and_update_buffers_once(way):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return F.dropout(F.dropout(x, 0.3) * (1 + self.mean.abs()), 0.5)

    net = nn.Sequential(small_net(), Counting())
    x = samples(8)
    torch.manual_seed(3)
    outs, masks = [], []
    for chunk in x.split(3):
        outs.append(net(chunk))
        masks.append(outs[-1] == 0)
    out = torch.cat(outs)
    (out.std() if way == "outputs" else out.sum() / 8 + out.square().mean()).backward()
    wanted = net[0][0].weight.grad
    state, mean = torch.get_rng_state(), net[1].mean.clone()
    net.zero_grad()
    net[1].calls.zero_()
    net[1].mean = torch.zeros_like(mean)
    torch.manual_seed(3)
    fn, options = {
        "outputs": (lambda b: net(b), {"loss": lambda o: o.std()}),
        "terms": (lambda b: _two_terms(net(b)), {}),
    }[way]
    step(fn, x, batchnorm="per_chunk", maximum=3, **options)
    torch.testing.assert_close(net[0][0].weight.grad, wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), state)
    assert net[1].calls == 3
    assert torch.equal(net[1].mean, mean)


def _two_terms(out):
    return {"sum": (out.sum(), len(out)), "square": (out.square().sum(), out.numel())}


@pytest.mark.parametrize("way", ["retry", "outputs", "terms"])
def test_a_function_that_runs_again_on_what_it_wrote_into_the_batch_is_warned_of_once(way):
    net, x = small_net(), {"x": samples(8), "n": 8}
    fits = out_of_memory_above(2)

    def fn(batch):
        batch["x"].div_(2)
        if way == "retry":
            fits(len(batch["x"]))
        out = net(batch["x"])
        return _two_terms(out) if way == "terms" else out if way == "outputs" else out.sum()

    options = {
        "retry": {"loss": "sum"},
        "outputs": {"loss": lambda o: o.std(), "maximum": 3},
        "terms": {"maximum": 3},
    }[way]
    with pytest.warns(
        AdaptiveUsageWarning,
        match=r"has written into float64\[8, 4\] on cpu, 256 B of the batch\.",
    ) as told:
        step(fn, x, in_dims={"x": 0, "n": None}, verify=False, **options)
    assert [warning.filename for warning in told] == [__file__]


def test_a_function_that_writes_and_runs_once_is_not_warned_of():
    net = small_net()
    # a warning is an error here
    result = step(lambda b: net(b.div_(2)).sum(), samples(8), loss="sum", maximum=2)
    assert result.sizes == (2, 2, 2, 2)


def test_an_empty_batch_does_what_the_plain_call_does():
    net = small_net()
    result = step(lambda b: net(b).square().mean(), samples(0))
    assert result.loss.isnan()
    assert result.sizes == (0,)
    step(lambda b: net(b).sum(), samples(0), loss="sum")


def test_a_memory_budget_on_the_cpu_splits_the_batch():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]).double()
    x = torch.randn(512, 64, dtype=torch.float64)

    def fn(b):
        return net(b).square().mean()

    fn(x).backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with memory_budget("1MiB") as budget:
        result = step(fn, x, cache_type=NoBatchsizeCache)
    assert result.attempts > 1
    assert sum(result.sizes) == 512
    assert budget.peak_bytes <= 2**20
    for p, w in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-10, atol=1e-12)


# --- what is remembered


def test_the_size_that_fitted_is_remembered_for_the_call():
    net, x = small_net(), samples(16)
    sizes = []

    def train(n_steps):
        check = out_of_memory_above(4)

        def fn(b):
            sizes.append(len(b))
            check(len(b))
            return net(b).square().mean()

        return [step(fn, x, verify=False).attempts for _ in range(n_steps)]

    reset()
    assert train(3) == [3, 1, 1]
    assert sizes[:3] == [16, 8, 4]
    assert train(2) == [1, 1]
    reset()
    assert train(1) == [3]


def test_a_context_and_a_cache_type_choose_what_is_remembered():
    net, x, check = small_net(), samples(16), out_of_memory_above(4)

    def fn(b):
        check(len(b))
        return net(b).square().mean()

    reset()
    assert [step(fn, x, cache_type=NoBatchsizeCache).attempts for _ in range(2)] == [3, 3]
    assert step(fn, x, context="training").attempts == 3
    assert step(fn, x, context="training").attempts == 1
    assert step(fn, x, context="evaluation").attempts == 3
    reset()


def test_nothing_that_is_remembered_keeps_the_model_alive():
    import weakref

    net, check = small_net(), out_of_memory_above(4)

    def fn(b, net=net):
        check(len(b))
        return net(b).square().mean()

    step(fn, samples(16))
    gone = weakref.ref(net[0].weight)
    del net, fn
    assert gone() is None
    reset()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_step_in_compiled_code_runs_as_it_is():
    net, x = small_net(), samples()

    def compiled():
        return step(lambda b: net(b).mean(), x, maximum=4).loss

    torch.testing.assert_close(torch.compile(compiled, backend="eager")(), net(x).mean())


def test_a_model_whose_step_failed_is_freed_without_the_collector():
    def failed():
        net = small_net()
        with contextlib.suppress(OutOfRetriesError):
            step(lambda b: out_of_memory_above(0)(len(net(b))), samples())
        return weakref.ref(net)

    gc.collect()
    gc.disable()
    try:
        assert failed()() is None
    finally:
        gc.enable()
