"""What `step` takes as a batch, as what the function returns, and as arguments."""

import dataclasses
import types
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, step

from ..step_cases import samples, small_net

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
    x = samples(5)
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
    step(fn, batch, loss="sum", maximum=2, verify=False)
    assert [type(b) for b in seen] == [type(batch)] * 3
    torch.testing.assert_close(w.grad, x.sum(0))


def test_in_dims_say_where_samples_are():
    x, y, mask = samples(6), torch.randn(3, 6, 2), torch.ones(4, dtype=torch.float64)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    seen = []

    def fn(b):
        seen.append((len(b["x"]), b["y"].shape, len(b["names"]), b["mask"] is mask, b["n"]))
        return (b["x"] * b["mask"] * w).sum()

    batch = {"x": x, "y": y, "names": list("abcdef"), "mask": mask, "n": torch.tensor(2)}
    dims = {"y": 1, "names": "items", "mask": None}
    step(fn, batch, loss="sum", in_dims=dims, maximum=4, verify=False)
    assert seen == [(4, (3, 4, 2), 4, True, 2), (2, (3, 2, 2), 2, True, 2)]


def test_a_bool_is_no_dimension():
    with pytest.raises(AdaptiveUsageError, match="in_dims has True for batch"):
        step(torch.mean, samples(), in_dims=True)


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

    step(fn, (torch.ones(5), np.ones((5, 2))), loss="sum", maximum=3, verify=False)
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
        (lambda o: o.sum().item(), {}, r"step\(\) returned a float, .* leave \.item\(\) out\. R"),
        (lambda o: o, {}, r"returned float64\[4, 3\] on cpu, 96 B\. Return a scalar loss, a pair"),
        (lambda o: (o.sum(), 3, 4), {}, "returned a tuple"),
        (lambda o: {}, {}, "returned no terms"),
        (
            lambda o: SimpleNamespace(loss=o.sum(), logits=o),
            {},
            "a SimpleNamespace. Return its .loss.",
        ),
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
        (lambda o: o.sum(), {"then": lambda s: s.detach()}, "No loss of step.. requires grad"),
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
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: returned(net(b)), samples(), maximum=4, **options)
    assert net[0].weight.grad is None


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda b: -1, "returned -1 for a micro-batch"),
        (lambda b: float("nan"), "returned nan"),
        (lambda b: torch.ones(3), r"returned float32\[3\] on cpu"),
    ],
)
def test_a_weight_that_is_none_is_described(weight, message):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: net(b).mean(), samples(), weight=weight, maximum=4, verify=False)


@pytest.mark.parametrize("maximum", [9, 4])
@pytest.mark.parametrize(
    ("returned", "where"),
    [(lambda out: None, r"step\(\)"), (lambda out: {"a": None}, r"step\(\), at \['a'\],")],
)
def test_a_function_that_returns_nothing_is_told_what_to_return(returned, where, maximum):
    net = small_net()
    message = rf"^The function of {where} returned None\. Return a scalar loss, a pair \(sum, count"
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: returned(net(b)), samples(), maximum=maximum)


@pytest.mark.parametrize("maximum", [9, 4])
def test_a_weight_beside_counts_is_not_taken_silently(maximum):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match="sums with their counts, and weight= was given"):
        step(lambda b: (net(b).sum(), len(b)), samples(), weight=len, maximum=maximum)


def test_chunks_with_other_terms_are_refused():
    net, x = small_net(), samples()

    def fn(b):
        out = net(b)
        terms = {"a": out.mean()}
        return terms | ({"b": out.mean()} if len(b) > 2 else {})

    with pytest.raises(AdaptiveUsageError, match="the terms 'a', 'b' for one micro-batch and 'a'"):
        step(fn, x, maximum=4)


@pytest.mark.parametrize("first_has_a_count", [True, False])
@pytest.mark.parametrize("others", [{}, {"size": (torch.tensor(0.0), 1)}])
def test_chunks_of_which_some_have_a_count_are_refused(first_has_a_count, others):
    net = small_net()

    def fn(b):
        out = net(b)
        is_pair = (len(b) == 4) == first_has_a_count
        return {"a": (out.sum(), out.numel()) if is_pair else out.mean(), **others}

    with pytest.raises(
        AdaptiveUsageError, match="a count with the term 'a' for one micro-batch and none for an"
    ):
        step(fn, samples(), maximum=4)


def test_chunks_with_other_outputs_are_refused():
    net, x = small_net(), samples()
    with pytest.raises(AdaptiveUsageError, match=r"output\['a'\] for one micro-batch"):
        step(lambda b: {"a" if len(b) > 2 else "b": net(b)}, x, loss=torch.sum, maximum=4)


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
        step(torch.sum, samples(), **options)


def test_limits_may_be_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    net = small_net()
    result = step(lambda b: net(b).mean(), samples(), minimum=np.int64(2), maximum=np.int32(4))
    assert (result.sizes, type(result.micro_batch)) == ((4, 3, 2), int)


def test_a_coroutine_function_is_refused():
    async def fn(b):
        return b.sum()

    with pytest.raises(AdaptiveUsageError, match="which does not run when it is called"):
        step(fn, samples())


def test_an_object_whose_calls_can_be_suspended_is_refused():
    class Loss:
        def __call__(self, b):
            yield b.sum()

    with pytest.raises(AdaptiveUsageError, match="which does not run when it is called"):
        step(Loss(), samples())


class Attributes(dict):
    """Items that are attributes, as a common recipe has it."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Open(dict):
    """Every name is an attribute, even one that is not there."""

    __getattr__ = dict.get


class Lengthy(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.lengths = items["x"].sum(1)


@dataclasses.dataclass
class Masked:
    x: torch.Tensor

    def __post_init__(self):
        self.mask = self.x > 0


@pytest.mark.parametrize("kind", [Attributes, Open])
def test_dicts_whose_items_are_attributes_are_split(kind):
    x = samples()
    result = step(lambda b: b.x.sum(), kind(x=x.requires_grad_()), loss="sum", maximum=4)
    torch.testing.assert_close(result.loss, x.detach().sum())
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("kind", [Lengthy, Masked])
def test_a_tensor_that_a_container_keeps_beside_its_items_is_refused_by_name(kind):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=f"batch is a {kind.__name__} that keeps '.*' as"):
        step(lambda b: net(b["x"]).sum(), kind(x=samples()), loss="sum", maximum=4)


def test_modules_in_the_batch_are_found():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    batch = {"x": samples(), "net": net}
    with pytest.raises(BatchCoupledError, match=r"batch\['net'\]\.0 \(BatchNorm1d"):
        step(lambda b: b["net"](b["x"]).mean(), batch, in_dims={"net": None}, maximum=4)
