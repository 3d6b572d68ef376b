"""What `step` takes, tells and refuses."""

import copy
import dataclasses
import functools
import pickle
import types
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    BatchCoupledError,
    NoBatchsizeCache,
    OutOfRetriesError,
    StepResult,
    is_oom,
    memory_budget,
    reset,
    step,
)

from .step_cases import split_as


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _x(n=9):
    return torch.randn(n, 4, dtype=torch.float64)


def out_of_memory_above(size):
    """What a chunk does that is too large."""

    def check(n):
        if n > size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return check


class Trainer:
    """What users write: a method that runs a model and helpers of the object."""

    def __init__(self, net, spare):
        self.net = net
        self.spare = spare

    def loss(self, x):
        return self.forward(x).square().mean()

    def forward(self, x):
        return self.net(x)


# --- results and retries


def test_the_result_tells_the_loss_its_terms_and_the_split():
    net, x, check = _net(), _x(), out_of_memory_above(4)

    def fn(b):
        check(len(b))
        out = net(b)
        return {"size": (out.square().sum(), out.numel()), "sum": (out.sum(), len(b))}

    events = []
    result = step(fn, x, on_retry=events.append)
    out = net(x).detach()
    assert isinstance(result, StepResult)
    assert (result.micro_batch, result.sizes, result.attempts) == (4, (4, 4, 1), 2)
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_result_can_be_copied_and_pickled(copied):
    net = _net()
    result = step(lambda b: {"size": net(b).square().mean()}, _x(), maximum=4)
    other = copied(result)
    assert isinstance(other, StepResult)
    assert torch.equal(other.loss, result.loss)
    assert other.terms == result.terms
    assert (other.micro_batch, other.sizes, other.attempts) == (4, (4, 4, 1), 1)
    with pytest.raises(TypeError):
        other.terms["other"] = other.loss


def test_minimum_and_maximum_bound_the_micro_batch():
    net, x, check = _net(), _x(16), out_of_memory_above(2)
    sizes = []

    def fn(b):
        sizes.append(len(b))
        check(len(b))
        return net(b).square().mean()

    with pytest.raises(OutOfRetriesError, match=r"'fn' ran out of .*micro-batch 12, 6, 3"):
        step(fn, x, minimum=3, maximum=12)
    assert sizes == [12, 6, 3]
    assert net[0].weight.grad is None


def test_an_error_of_the_function_goes_on_and_leaves_everything_as_it_was():
    net, x = _net(), _x()
    net[0].weight.grad = prior = torch.ones(8, 4, dtype=torch.float64)
    state = torch.get_rng_state()

    def fn(b):
        torch.rand(3)
        if b[0, 0] == x[8, 0]:
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
        net = _net()
        check = out_of_memory_above(limit)

        def fn(b):
            out = F.dropout(net(F.dropout(b, 0.3)), 0.5)
            check(len(b))
            return out.square().mean()

        torch.manual_seed(3)
        result = step(fn, x, maximum=maximum)
        return result, net[0].weight.grad, torch.get_rng_state()

    x = _x(8)
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

    net = nn.Sequential(_net(), Counting())
    x = _x(8)
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
    net, x = _net(), {"x": _x(8), "n": 8}
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
        step(fn, x, in_dims={"x": 0, "n": None}, **options)
    assert [warning.filename for warning in told] == [__file__]


def test_a_function_that_writes_and_runs_once_is_not_warned_of():
    net = _net()
    # a warning is an error here
    result = step(lambda b: net(b.div_(2)).sum(), _x(8), loss="sum", maximum=2)
    assert result.sizes == (2, 2, 2, 2)


def test_an_empty_batch_does_what_the_plain_call_does():
    net = _net()
    result = step(lambda b: net(b).square().mean(), _x(0))
    assert result.loss.isnan()
    assert result.sizes == (0,)
    step(lambda b: net(b).sum(), _x(0), loss="sum")


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


# --- batches


class Pair(NamedTuple):
    x: torch.Tensor
    y: object


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    scale: float
    name: str = "record"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, 2.0],
        lambda x: (x, "name"),
        lambda x: Pair(x, None),
        lambda x: Record(x, 1.0),
        lambda x: OrderedDict(x=x, y=[x, {"z": x}]),
        lambda x: UserDict(x=x, n=3),
        lambda x: types.MappingProxyType({"x": x}),
    ],
)
def test_a_chunk_has_the_structure_of_the_batch(make):
    x = _x(5)
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    seen = []

    def fn(b):
        seen.append(b)
        x = b.x if hasattr(b, "x") else b["x"] if isinstance(b, UserDict | dict) else b[0]
        return (x * w).sum()

    batch = make(x)
    if isinstance(batch, types.MappingProxyType):
        with pytest.raises(AdaptiveUsageError, match="mappingproxy"):
            step(fn, batch, loss="sum", maximum=2)
        return
    step(fn, batch, loss="sum", maximum=2)
    assert [type(b) for b in seen] == [type(batch)] * 3
    torch.testing.assert_close(w.grad, x.sum(0))


def test_in_dims_say_where_samples_are():
    x, y, mask = _x(6), torch.randn(3, 6, 2), torch.ones(4, dtype=torch.float64)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    seen = []

    def fn(b):
        seen.append((len(b["x"]), b["y"].shape, len(b["names"]), b["mask"] is mask, b["n"]))
        return (b["x"] * b["mask"] * w).sum()

    batch = {"x": x, "y": y, "names": list("abcdef"), "mask": mask, "n": torch.tensor(2)}
    dims = {"y": 1, "names": "items", "mask": None}
    step(fn, batch, loss="sum", in_dims=dims, maximum=4)
    assert seen == [(4, (3, 4, 2), 4, True, 2), (2, (3, 2, 2), 2, True, 2)]


def test_a_bool_is_no_dimension():
    with pytest.raises(AdaptiveUsageError, match="in_dims has True for batch"):
        step(torch.mean, _x(), in_dims=True)


def test_a_dimension_that_an_array_of_numpy_does_not_have_is_refused():
    np = pytest.importorskip("numpy")
    batch = {"x": torch.ones(5), "y": np.ones((5, 2))}
    with pytest.raises(
        AdaptiveUsageError, match=r"has 3 for batch\['y'\], .* array of float64\[5, 2"
    ):
        step(lambda b: b["x"].sum(), batch, in_dims={"y": 3})


def test_a_step_on_meta_tensors_runs_backward():
    net = nn.Linear(4, 1, device="meta")
    step(lambda b: net(b).mean(), torch.ones(9, 4, device="meta"), maximum=4)
    assert net.weight.grad.shape == (1, 4)


def test_an_array_of_numpy_is_split_too():
    np = pytest.importorskip("numpy")
    w = torch.ones((), requires_grad=True)
    seen = []

    def fn(b):
        seen.append((len(b[0]), b[1].shape))
        return (b[0] * w).sum()

    step(fn, (torch.ones(5), np.ones((5, 2))), loss="sum", maximum=3)
    assert seen == [(3, (3, 2)), (2, (2, 2))]


@pytest.mark.parametrize(
    ("batch", "dims", "message"),
    [
        (3, 0, r"batch holds no tensor with samples, so there is nothing to split\."),
        (torch.tensor(1.0), 0, "batch holds no tensor with samples"),
        (
            {"x": torch.ones(4, 2), "mask": torch.ones(7)},
            0,
            r"batch\['x'\] has 4 samples along dimension 0, and batch\['mask'\] has 7 samples "
            r"along dimension 0\. Say with in_dims which dimension of batch\['mask'\] has",
        ),
        ([torch.ones(2), ["a", "b"]], 0, r"batch\[1\] is a list of 2 plain values, as many as"),
        ({"x": torch.ones(2), "g": object()}, 0, r"batch\['g'\] is a object, which can't be taken"),
        (torch.ones(2, 2), 2, r"in_dims has 2 for batch, which is float32\[2, 2\] on cpu, 16 B"),
        ({"x": torch.ones(2)}, {"y": 0}, r"in_dims has {'y': 0} for batch, which has 'x'\."),
        ([torch.ones(2)], [0, 0], r"in_dims has \[0, 0\] for batch, which has 0"),
        ({"x": torch.ones(2)}, {"x": "items"}, "in_dims has 'items' for batch"),
        ({"x": torch.ones(2), "y": 3}, {"y": "items"}, "Only a list or a tuple has items"),
        (
            torch.eye(3).to_sparse(),
            0,
            r"batch is float32\[3, 3\] on cpu.* of layout torch.sparse_coo",
        ),
    ],
)
def test_what_can_not_be_split_is_named(batch, dims, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: None, batch, in_dims=dims)


# --- what the function returns


@pytest.mark.parametrize(
    ("returned", "options", "message"),
    [
        (lambda o: o.sum().item(), {}, r"The function of step\(\), returned a float, "),
        (lambda o: o, {}, r"returned float64\[4, 3\] on cpu, 96 B\. Return a scalar loss, a pair"),
        (lambda o: (o.sum(), 3, 4), {}, "returned a tuple"),
        (lambda o: {}, {}, "returned no terms"),
        (lambda o: {1: o.sum(), "1": o.mean()}, {}, r"terms of the same name: 1, '1'\."),
        (lambda o: {"a": o}, {}, r"The function of step\(\), at \['a'\], returned float64\[4, 3\]"),
        (lambda o: (o.sum(), o.sum()), {}, "a count of float64.* that requires grad"),
        (lambda o: (o.sum(), "3"), {}, "returned a count of a str, '3'"),
        (
            lambda o: (o.sum(), 3),
            {"loss": "sum"},
            r"returned a pair \(sum, count\).*and loss=\"sum\"",
        ),
        (lambda o: o.sum().detach(), {}, "No loss of step.. requires grad"),
        (lambda o: o.argmax(), {}, r"returned int64\[\] on cpu"),
        (lambda o: o.sum(), {"then": lambda s: s.item()}, r"then\(\) of step\(\) returned a float"),
        (lambda o: o.sum(), {"then": lambda s: s.detach()}, r"then\(\) .*no function of the loss"),
        (lambda o: o, {"loss": lambda o: o}, r"loss\(\) of step\(\) returned float64\["),
        (
            lambda o: o[:1],
            {"loss": torch.sum},
            r"got \d samples, and output has 1: float64\[1, 3\]",
        ),
        (lambda o: o.sum(), {"loss": torch.sum}, "an output without samples that differs from one"),
        (lambda o: o.sum(), {"once": lambda: 3.0}, r"once\(\) of step\(\) returned a float, 3\.0"),
    ],
)
def test_what_is_no_loss_is_described(returned, options, message):
    net = _net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: returned(net(b)), _x(), maximum=4, **options)
    assert net[0].weight.grad is None


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda b: -1, "returned -1 for a micro-batch"),
        (lambda b: float("nan"), "returned nan"),
        (lambda b: torch.ones(3), r"returned float32\[3\] on cpu"),
        (lambda b: {"other": 1}, r"returned a term 'loss', and weight\(\) has 'other'"),
        (lambda b: {"loss": 1} if len(b) > 1 else {"lost": 1}, "without 'loss', which it had"),
    ],
)
def test_a_weight_that_is_none_is_described(weight, message):
    net = _net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: net(b).mean(), _x(), weight=weight, maximum=4)


@pytest.mark.parametrize("maximum", [9, 4])
def test_a_weight_beside_counts_is_not_taken_silently(maximum):
    net = _net()
    with pytest.raises(AdaptiveUsageError, match="sums with their counts, and weight= was given"):
        step(lambda b: (net(b).sum(), len(b)), _x(), weight=len, maximum=maximum)


def test_chunks_with_other_terms_are_refused():
    net, x = _net(), _x()

    def fn(b):
        out = net(b)
        terms = {"a": out.mean()}
        return terms | ({"b": out.mean()} if len(b) > 1 else {})

    with pytest.raises(AdaptiveUsageError, match="the terms 'a', 'b' for one micro-batch and 'a'"):
        step(fn, x, maximum=4)


@pytest.mark.parametrize("first_has_a_count", [True, False])
@pytest.mark.parametrize("others", [{}, {"size": (torch.tensor(0.0), 1)}])
def test_chunks_of_which_some_have_a_count_are_refused(first_has_a_count, others):
    net = _net()

    def fn(b):
        out = net(b)
        is_pair = (len(b) == 4) == first_has_a_count
        return {"a": (out.sum(), out.numel()) if is_pair else out.mean(), **others}

    with pytest.raises(
        AdaptiveUsageError, match="a count with the term 'a' for one micro-batch and none for an"
    ):
        step(fn, _x(), maximum=4)


def test_chunks_with_other_outputs_are_refused():
    net, x = _net(), _x()
    with pytest.raises(AdaptiveUsageError, match=r"output\['a'\] for one micro-batch"):
        step(lambda b: {"a" if len(b) > 1 else "b": net(b)}, x, loss=torch.sum, maximum=4)


# --- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "max"}, "loss='max'. Say what the function returns"),
        ({"loss": "sum", "weight": len}, 'weight= with loss="sum", and a sum has no weights'),
        ({"loss": torch.sum, "weight": len}, r"weight= with a loss= that is a function\."),
        ({"loss": torch.sum, "then": torch.log}, r"then= with a loss= that is a function\."),
        ({"weight": 3}, "got a int as weight=, which can't be called"),
        ({"batchnorm": "merge"}, 'batchnorm=\'merge\'. It is "refuse" or "per_chunk"'),
        ({"scaler": 3}, r"got a int as scaler=\. Pass a torch.amp.GradScaler"),
        ({"minimum": 0}, r"minimum=0 is not a size\. Give a whole number from 1 up"),
        ({"maximum": True}, "maximum=True is not a size"),
        ({"maximum": 2.5}, r"maximum=2\.5 is not a size"),
        ({"model": 3}, r"got a int as model=\. Pass the nn.Module"),
        ({"model": []}, "got a list as model="),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        step(torch.sum, _x(), **options)


def test_limits_may_be_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    net = _net()
    result = step(lambda b: net(b).mean(), _x(), minimum=np.int64(2), maximum=np.int32(4))
    assert (result.sizes, type(result.micro_batch)) == ((4, 4, 1), int)


def test_a_group_is_not_taken_silently():
    with pytest.raises(TypeError, match="group"):
        step(torch.sum, _x(), group=None)


def test_a_coroutine_function_is_refused():
    async def fn(b):
        return b.sum()

    with pytest.raises(AdaptiveUsageError, match="which does not run when it is called"):
        step(fn, _x())


def test_an_object_whose_calls_can_be_suspended_is_refused():
    class Loss:
        def __call__(self, b):
            yield b.sum()

    with pytest.raises(AdaptiveUsageError, match="which does not run when it is called"):
        step(Loss(), _x())


# --- what mixes samples


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(8),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("norm", NORMS)
def test_batchnorm_in_training_is_refused_by_name_when_the_batch_has_to_be_split(norm):
    net = nn.Sequential(nn.Linear(4, 8), NORMS[norm](), nn.Linear(8, 1))
    check = out_of_memory_above(4)

    def fn(b):
        check(len(b))
        return net(b).mean()

    with pytest.raises(
        BatchCoupledError,
        match=rf"The batch of 9 has to be split into micro-batches of 4, and net\.1 \({norm}, "
        r"training with the statistics of its batch\) would give other results then\. Nothing was",
    ) as caught:
        step(fn, torch.randn(9, 4))
    assert caught.value.names == ("net.1",)
    assert not is_oom(caught.value)
    assert net[0].weight.grad is None


def test_batchnorm_may_stay_when_the_batch_fits_or_it_is_frozen():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(9, 4)
    step(lambda b: net(b).mean(), x)
    assert net[1].num_batches_tracked == 1
    net[1].eval()
    step(lambda b: net(b).mean(), x, maximum=4)
    assert net[1].num_batches_tracked == 1


def test_batchnorm_without_statistics_and_instance_norm_with_them_are_refused():
    bare = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(BatchCoupledError, match=r"bare \(BatchNorm1d, without running statistics"):
        step(lambda b: bare(b).square().mean(), torch.randn(9, 4), maximum=4)
    tracked = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    with pytest.raises(BatchCoupledError, match="training its running statistics"):
        step(lambda b: tracked(b).square().mean(), torch.randn(9, 4, 3), maximum=4)
    plain = nn.InstanceNorm1d(4, affine=True)
    step(lambda b: plain(b).square().mean(), torch.randn(9, 4, 3), maximum=4)


def test_a_module_that_writes_a_buffer_in_each_call_is_refused():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    with pytest.raises(
        BatchCoupledError, match=r"normed\.parametrizations\.weight\.0 \(_SpectralNorm, each call"
    ):
        step(lambda b: normed(b).mean(), torch.randn(9, 4), maximum=4)
    normed.eval()
    step(lambda b: normed(b).mean(), torch.randn(9, 4), maximum=4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_are_split_and_their_batchnorm_refused():
    net = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    with pytest.raises(BatchCoupledError, match=r"net\.1 \(.*num_batches_tracked"):
        step(lambda b: net(b).mean(), torch.randn(9, 4), maximum=4)
    assert net.state_dict()["1.num_batches_tracked"] == 0
    assert step(lambda b: net.eval()(b).mean(), torch.randn(9, 4), maximum=4).sizes == (4, 4, 1)


def test_a_buffer_that_grows_is_a_cache_and_no_statistic():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(1))
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if len(self.table) < x.shape[1]:
                self.table = torch.arange(x.shape[1]).float()
            return x * self.table * self.w

    net = Cached()
    assert step(lambda b: net(b).mean(), torch.randn(9, 4), maximum=4).sizes == (4, 4, 1)


def test_per_chunk_lets_batchnorm_see_micro_batches_and_never_a_single_sample():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(9, 4)
    sizes = []

    def fn(b):
        sizes.append(len(b))
        return net(b).mean()

    result = step(fn, x, batchnorm="per_chunk", maximum=4)
    assert (result.sizes, sizes) == ((4, 3, 2), [4, 3, 2])
    assert (result.micro_batch, net[1].num_batches_tracked) == (4, 3)
    check = out_of_memory_above(1)

    def never(b):
        check(len(b))
        return net(b).mean()

    with pytest.raises(OutOfRetriesError, match="micro-batch 9, 4, 2"):
        step(never, x, batchnorm="per_chunk")


@pytest.mark.parametrize(
    ("n_samples", "maximum", "sizes"),
    [(4, 3, (2, 2)), (7, 3, (3, 2, 2)), (5, 2, (2, 3)), (3, 2, (3,)), (1, None, (1,))],
)
def test_per_chunk_takes_the_partner_of_a_last_sample_from_the_micro_batch_before(
    n_samples, maximum, sizes
):
    norm = nn.BatchNorm2d(4)
    x = torch.randn(n_samples, 4, 3, 3)
    result = step(lambda b: norm(b).square().mean(), x, batchnorm="per_chunk", maximum=maximum)
    assert (result.sizes, result.micro_batch) == (sizes, max(sizes))


@pytest.mark.parametrize(("maximum", "sizes"), [(1, (1, 1, 1)), (2, (2, 1))])
def test_per_chunk_keeps_the_maximum_where_no_module_needs_two_samples(maximum, sizes):
    net = _net()
    result = step(lambda b: net(b).mean(), _x(3), batchnorm="per_chunk", maximum=maximum)
    assert (result.sizes, result.micro_batch) == (sizes, maximum)


@pytest.mark.parametrize(
    "how", ["closure", "global", "partial", "method", "lambda of self", "helper", "list", "module"]
)
def test_modules_are_found_however_the_function_reaches_them(how):
    norm, spare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    models = {"a": [norm]}
    space = {"net": norm, "spare": spare, "len": spare}
    exec("def loss(b):\n    return net(b).square().mean()", space)
    trainer = Trainer(norm, spare)

    def helper(b):
        return norm(b).square().mean()

    fn, name = {
        "closure": (lambda b: norm(b).square().mean(), "norm"),
        "global": (space["loss"], "net"),
        "partial": (functools.partial(lambda m, b: m(b).square().mean(), norm), "argument 1"),
        "method": (trainer.loss, "self.net"),
        "lambda of self": (lambda b: trainer.loss(b), "net"),
        "helper": (lambda b: helper(b), "norm"),
        "list": (lambda b: models["a"][0](b).square().mean(), "models"),
        "module": (nn.Sequential(norm, _Mean()), "Sequential.0"),
    }[how]
    with pytest.raises(BatchCoupledError) as caught:
        step(fn, torch.randn(9, 4), maximum=4)
    (found,) = caught.value.names
    assert name in found


class _Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def test_model_names_the_modules_that_no_search_finds():
    hidden = [nn.BatchNorm1d(4)]

    class Opaque:
        __slots__ = ()

        def __call__(self, b):
            return next(iter(hidden))(b).square().mean()

    with pytest.raises(BatchCoupledError, match=r"model\[0\] \(BatchNorm1d"):
        step(Opaque(), torch.randn(9, 4), model=hidden, maximum=4)


def test_modules_that_talk_to_other_ranks_are_refused(monkeypatch):
    class FSDPLinear(nn.Linear):
        """Named as FSDP names what it wraps."""

    net = nn.Sequential(FSDPLinear(4, 3).double())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    step(lambda b: net(b).mean(), _x())
    with pytest.raises(
        AdaptiveUsageError, match=r"on this rank, and net\.0 \(FSDPLinear\) exchanges"
    ):
        step(lambda b: net(b).mean(), _x(), maximum=4)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert len(step(lambda b: net(b).mean(), _x(), maximum=4).sizes) == 3


def test_a_hook_that_steps_inside_backward_is_refused_when_the_batch_is_split():
    net, x = _net(), _x()
    steps = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    step(lambda b: net(b).square().mean(), x)
    assert len(steps) == 4
    with pytest.raises(
        AdaptiveUsageError, match="4 of the parameters have a hook from register_pos"
    ):
        step(lambda b: net(b).square().mean(), x, maximum=4)
    assert len(steps) == 4


@pytest.mark.simdevice
def test_an_optimizer_in_a_hook_is_refused_on_whatever_thread_it_runs(sim):
    for device in ("cpu", sim.device):
        net = _net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net[0].weight.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
        before = net[0].weight.detach().clone()
        with pytest.raises(AdaptiveUsageError, match=r"SGD\.step\(\) was called inside step\(\)"):
            step(lambda b, net=net: net(b).square().mean(), _x().to(device))
        assert torch.equal(net[0].weight, before)
        assert net[0].weight.grad is None
        net(_x().to(device)).mean().backward()  # the hook may step anywhere else
        assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize("maximum", [9, 4])
def test_an_optimizer_inside_the_function_is_refused(maximum):
    net, x = _net(), _x()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net[0].weight.detach().clone()

    def fn(b):
        loss = net(b).square().mean()
        optimizer.step()
        return loss

    with pytest.raises(AdaptiveUsageError, match=r"SGD\.step\(\) was called inside step\(\)"):
        step(fn, x, maximum=maximum)
    assert torch.equal(net[0].weight, before)
    optimizer.step()


def test_a_graph_from_before_the_step_is_refused_by_its_name():
    net, x = _net(), _x()
    scale = net[0].weight.exp().sum()
    with pytest.raises(
        AdaptiveUsageError, match="uses a tensor, such as 'scale', that was computed"
    ):
        step(lambda b: (net(b) * scale.exp()).mean(), x, maximum=4)
    assert net[0].weight.grad is None


def test_a_function_that_runs_backward_itself_is_refused():
    net, x = _net(), _x()

    def fn(b):
        loss = net(b).square().mean()
        loss.backward()
        return loss

    with pytest.raises(AdaptiveUsageError, match="or it runs backward itself"):
        step(fn, x)
    assert net[0].weight.grad is None


def test_gradients_disabled_are_explained():
    net = _net()
    with torch.no_grad(), pytest.raises(AdaptiveUsageError, match="with gradients enabled"):
        step(lambda b: net(b).mean(), _x(), maximum=4)


def test_checkpointed_models_are_split_too():
    from torch.utils.checkpoint import checkpoint

    net, x = _net(), _x()
    net(x).square().mean().backward()
    wanted = net[0].weight.grad
    for reentrant in (True, False):
        net.zero_grad()
        leaf = x.clone().requires_grad_()

        def fn(b, reentrant=reentrant):
            out = checkpoint(net, b, use_reentrant=reentrant)
            return out.square().sum(), out.numel()

        step(fn, leaf, maximum=4)
        torch.testing.assert_close(net[0].weight.grad, wanted)


def test_steps_in_a_scope_leave_their_gradients_and_their_loss(monkeypatch):
    from tenure import NewDisposeScope

    net, x = _net(), _x()
    with NewDisposeScope() as scope:
        split_as(monkeypatch, [2, 7])
        result = step(lambda b: (net(b).sum(), len(b)), x, maximum=4)
        kept = scope.move_to_outer(result.loss)
    assert float(kept) == float(kept)
    net[0].weight.grad.add_(1)


# --- what is remembered


def test_the_size_that_fitted_is_remembered_for_the_call():
    net, x = _net(), _x(16)
    sizes = []

    def train(n_steps):
        check = out_of_memory_above(4)

        def fn(b):
            sizes.append(len(b))
            check(len(b))
            return net(b).square().mean()

        return [step(fn, x).attempts for _ in range(n_steps)]

    reset()
    assert train(3) == [3, 1, 1]
    assert sizes[:3] == [16, 8, 4]
    assert train(2) == [1, 1]
    reset()
    assert train(1) == [3]


def test_a_context_and_a_cache_type_choose_what_is_remembered():
    net, x, check = _net(), _x(16), out_of_memory_above(4)

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

    net, check = _net(), out_of_memory_above(4)

    def fn(b, net=net):
        check(len(b))
        return net(b).square().mean()

    step(fn, _x(16))
    gone = weakref.ref(net[0].weight)
    del net, fn
    assert gone() is None
    reset()
