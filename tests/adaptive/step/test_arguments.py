"""What `step` takes as a batch, as what the function returns, and as arguments."""

import dataclasses
import types
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import DisposedTensorError
from tenure.adaptive import AdaptiveUsageError, AdaptiveUsageWarning, step

from ..attempt.failures import out_of_memory_above
from .step_cases import samples, small_net

# --- batches


class Pair(NamedTuple):
    x: torch.Tensor
    y: object


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    scale: float
    name: str = "record"


class Attributes(dict):
    """Items that are attributes, as a common recipe has it."""

    def __init__(self, *args, **items):
        super().__init__(*args, **items)
        self.__dict__ = self


class Open(dict):
    """Every name is an attribute, even one that is not there."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, "name"),
        lambda x: Pair(x, None),
        lambda x: Record(x, 1.0),
        lambda x: OrderedDict(x=x, y=[x, {"z": x}]),
        lambda x: UserDict(x=x, n=3),
        lambda x: Attributes(x=x),
        lambda x: Open(x=x),
    ],
)
def test_a_chunk_has_the_structure_of_the_batch(make):
    x, seen = samples(5), []
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def fn(b):
        seen.append(b)
        x = b["x"] if isinstance(b, UserDict | dict) else b.x if hasattr(b, "x") else b[0]
        return (x * w).sum()

    batch = make(x)
    step(fn, batch, loss="sum", maximum=2, verify=False)
    assert [type(b) for b in seen] == [type(batch)] * 3
    torch.testing.assert_close(w.grad, x.sum(0))


def test_in_dims_say_where_samples_are():
    x, y, mask = samples(6), torch.randn(3, 6, 2), torch.ones(4, dtype=torch.float64)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    seen = []

    def fn(b):
        seen.append((len(b["x"]), b["y"].shape, len(b["names"]), b["mask"] is mask, b["a"].shape))
        return (b["x"] * b["mask"] * w).sum()

    batch = {"x": x, "y": y, "names": list("abcdef"), "mask": mask, "a": np.ones((6, 2))}
    dims = {"y": 1, "names": "items", "mask": None}
    step(fn, batch, loss="sum", in_dims=dims, maximum=4, verify=False)
    assert seen == [(4, (3, 4, 2), 4, True, (4, 2)), (2, (3, 2, 2), 2, True, (2, 2))]


class Lengthy(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.lengths = items["x"].sum(1)


@dataclasses.dataclass
class Masked:
    x: torch.Tensor

    def __post_init__(self):
        self.mask = self.x > 0


X = torch.ones(5, 4)


@pytest.mark.parametrize(
    ("batch", "dims", "message"),
    [
        (3, 0, r"batch holds no tensor with samples, so there is nothing to split\."),
        (torch.tensor(1.0), 0, "batch holds no tensor with samples"),
        ({"x": X, "mask": X[:3]}, 0, r"Say with in_dims which dimension of batch\['mask'\] has"),
        ([torch.ones(2), ["a", "b"]], 0, r"batch\[1\] is a list of 2 plain values, as many as"),
        ({"x": torch.ones(2), "g": object()}, 0, r"batch\['g'\] is a object, which can't be taken"),
        (types.MappingProxyType({"x": X}), 0, "mappingproxy"),
        (Lengthy(x=X), 0, "batch is a Lengthy that keeps '.*' as"),
        (Masked(X), 0, "batch is a Masked that keeps '.*' as"),
        (torch.ones(2, 2), 2, r"in_dims has 2 for batch, which is float32\[2, 2\] on cpu, 16 B"),
        (X, True, "in_dims has True for batch"),
        ({"x": X, "y": np.ones((5, 2))}, {"y": 3}, r"has 3 for batch\['y'\], .* array of float64"),
        ({"x": torch.ones(2)}, {"y": 0}, r"in_dims has {'y': 0} for batch, which has 'x'\."),
        ([torch.ones(2)], [0, 0], r"in_dims has \[0, 0\] for batch, which has 0"),
        ({"x": torch.ones(2)}, {"x": "items"}, "in_dims has 'items' for batch"),
        ({"x": torch.ones(2), "y": 3}, {"y": "items"}, "Only a list or a tuple has items"),
        (torch.eye(3).to_sparse(), 0, r"batch is float32\[3, 3\].* of layout torch.sparse_coo"),
        ({"boxes": [X[:n] for n in range(6)]}, 0, r"If batch\['boxes'\] .* give \"items\" at its"),
        (([X, X], [{"boxes": X[:2]}] * 2), 0, r"If batch\[0\] and batch\[1\] have one item a"),
        (([X] * 3, [{}] * 3), "items", r"split these, give \(\"items\",\) \* 2\. If each of them"),
    ],
)
def test_what_can_not_be_split_is_named(batch, dims, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: None, batch, in_dims=dims, maximum=1)


def test_a_list_of_more_tensors_than_rows_is_asked_about_before_it_is_split():
    net, rows = small_net(), [torch.randn(4, dtype=torch.float64) for _ in range(12)]

    def fn(b):
        return net(torch.stack(list(b))).square().mean()

    with pytest.raises(AdaptiveUsageError, match="is a list of 12 tensors, and each has 4 rows"):
        step(fn, rows, maximum=3)
    assert step(fn, rows).sizes == (4,)
    assert step(fn, rows, in_dims="items", maximum=5).sizes == (5, 5, 2)
    columns = [torch.randn(4, 4, dtype=torch.float64) for _ in range(12)]
    result = step(lambda b: sum(net(x).mean() for x in b), columns, in_dims=[0] * 12, maximum=3)
    assert result.sizes == (2, 2)


# --- what the function returns

_A = {"a": torch.ones((), requires_grad=True)}
ONE_COUNT = "a count with the term 'a' for one micro-batch and none for an"


@pytest.mark.parametrize(
    ("returned", "options", "message"),
    [
        (lambda o: None, {}, r"function of step\(\) returned None\. Return a scalar loss, a pair"),
        (lambda o: {"a": None}, {}, r"function of step\(\), at \['a'\], returned None\."),
        (lambda o: o.sum().item(), {}, r"step\(\) returned a float, .* leave \.item\(\) out\. R"),
        (lambda o: o, {}, r"returned float64\[4, 3\] on cpu, 96 B\. Return a scalar loss, a pair"),
        (lambda o: (o.sum(), 3, 4), {}, "returned a tuple"),
        (lambda o: {}, {}, "returned no terms"),
        (lambda o: SimpleNamespace(loss=o.sum()), {}, "a SimpleNamespace. Return its .loss."),
        (lambda o: {1: o.sum(), "1": o.mean()}, {}, r"terms of the same name: 1, '1'\."),
        (lambda o: {"a": o}, {}, r"The function of step\(\), at \['a'\], returned float64\[4, 3\]"),
        (lambda o: (o.sum(), o.sum()), {}, "a count of float64.* that requires grad"),
        (lambda o: (o.sum(), "3"), {}, "returned a count of a str, '3'"),
        (lambda o: (o.sum(), True), {}, "returned a count of a bool"),
        (lambda o: (o.sum(), np.ones(2)), {}, "returned a count of a ndarray"),
        (lambda o: (o.sum(), 3), {"loss": "sum"}, r"a pair \(sum, count\).*and loss=\"sum\""),
        (lambda o: (o.sum(), 3), {"weight": len}, "with their counts, and weight= was given"),
        (lambda o: o.sum().detach(), {}, "No loss of step.. requires grad"),
        (lambda o: o.argmax(), {}, r"returned int64\[\] on cpu"),
        (lambda o: o.sum(), {"then": lambda s: s.item()}, r"then\(\) of step\(\) returned a float"),
        (lambda o: o.sum(), {"then": lambda s: s.detach()}, "No loss of step.. requires grad"),
        (lambda o: o, {"loss": lambda o: o}, r"loss\(\) of step\(\) returned float64\["),
        (
            lambda o: o,
            {"loss": lambda o: _A},
            r"step\(\) returned a dict, .*\. Return a scalar loss\.$",
        ),
        (lambda o: o.repeat(2, 1), {"loss": torch.sum}, r"2 for each are 2 outputs, as chunk\(2\)"),
        (lambda o: o[:1], {"loss": torch.sum}, r"got \d samples, and output has 1: float64\[1, 3"),
        (lambda o: o.sum(), {"loss": torch.sum}, "an output without samples that differs from one"),
        (lambda o: o.sum(), {"once": lambda: 3.0}, r"once\(\) of step\(\) returned a float, 3\.0"),
        (lambda o: {"b": o.mean()} | (_A if len(o) > 2 else {}), {}, "the terms 'b', 'a' for one"),
        (lambda o: {"a": (o.sum(), 9) if len(o) == 4 else o.mean()}, {}, ONE_COUNT),
        (
            lambda o: {"a": o.mean() if len(o) == 4 else (o.sum(), 9), "b": (o.sum(), 1)},
            {},
            ONE_COUNT,
        ),
        (lambda o: {"a" if len(o) > 2 else "b": o}, {"loss": torch.sum}, r"output\['a'\] for one"),
        (lambda o: o.mean(), {"weight": lambda b: -1}, "returned -1 for a micro-batch"),
        (lambda o: o.mean(), {"weight": lambda b: float("nan")}, "returned nan"),
        (lambda o: o.mean(), {"weight": lambda b: torch.ones(3)}, r"returned float32\[3\] on cpu"),
        (lambda o: o.mean(), {"weight": lambda b: {"a": 1}}, "return a dict of pairs"),
        (lambda o: o.mean(), {"weight": lambda b: True}, "returned True for a micro-batch"),
        (lambda o: o.mean(), {"weight": lambda b: torch.tensor(1j)}, "returned 1j for"),
    ],
)
def test_what_is_no_loss_or_weight_is_described(returned, options, message):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: returned(net(b)), samples(), **{"maximum": 4, "verify": False} | options)
    assert net[0].weight.grad is None


@pytest.mark.parametrize("maximum", [4, None])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda o: (o.mean(), o.argmax()), r"a pair, which is \(sum, count\), and the first of it"),
        (
            lambda o: {"a": (F.mse_loss(o, o * 0), 9)},
            "a pair as 'a', .* and the first of it is a m",
        ),
        (lambda o: (o.sum(), o), "requires grad.*has_aux=True: return loss, others"),
        (lambda o: dict.fromkeys("ab", o.mean()), "'b' and 'a', .* 'a' is made of 'b'"),
        (lambda o: {"a": (a := o.mean()), "loss": a + 2 * o.sum()}, "'loss' is made of 'a'"),
    ],
)
def test_what_is_no_part_of_the_loss_is_refused_beside_it(returned, message, maximum):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: returned(net(b)), samples(), maximum=maximum)
    assert net[0].weight.grad is None


def test_a_term_without_a_graph_is_warned_of_and_terms_of_one_sum_are_not():
    net = small_net()
    with pytest.warns(AdaptiveUsageWarning, match="the term 'a', which has no graph"):
        step(lambda b: {"loss": net(b).mean(), "a": net(b).detach().sum()}, samples())
    step(lambda b: {"a": (total := net(b).sum(), 9), "b": (total, 3)}, samples())
    # as an auxiliary loss that is off
    step(lambda b: {"loss": net(b).mean(), "a": torch.zeros(())}, samples())
    step(
        lambda b: {"a": (a := net(b).mean()), "b": a + 1},
        samples(),
        then=lambda terms: terms["b"],
    )


@pytest.mark.parametrize("maximum", [4, None])
@pytest.mark.parametrize("total", [lambda o: o.sum().mean(), lambda o: o.square().sum(0).mean()])
def test_a_mean_of_sums_over_samples_is_a_sum_over_them(total, maximum):
    net, batch = small_net(), samples()
    weight = net[0].weight
    (expected,) = torch.autograd.grad(total(net(batch)) / len(batch), weight)
    step(lambda b: (total(net(b)), len(b)), batch, maximum=maximum)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("returned", [lambda o: None, lambda o: (o.sum(), 9)])
def test_what_is_refused_in_parts_is_refused_in_a_batch_that_fits(returned):
    net = small_net()
    with pytest.raises(AdaptiveUsageError, match=r"returned None|weight= was given"):
        step(lambda b: returned(net(b)), samples(), weight=len)


# --- arguments

SCALER = torch.amp.GradScaler("cpu")


async def _suspended(b):
    return b.sum()


class _Generating:
    def __call__(self, b):
        yield b.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "max"}, "loss='max'. Say what the function returns"),
        ({"loss": "sum", "weight": len}, 'weight= with loss="sum", and a sum has no weights'),
        ({"loss": torch.sum, "weight": len}, r"weight= with a loss= that is a function\."),
        ({"loss": torch.sum, "then": torch.log}, r"then= with a loss= that is a function\."),
        ({"weight": 3}, "got a int as weight=, which can't be called"),
        ({"backward": 3}, r"step\(\) got a int as backward="),
        ({"scaler": SCALER, "backward": torch.sum}, "got scaler= and backward="),
        ({"batchnorm": "merge"}, 'batchnorm=\'merge\'. It is "refuse" or "per_chunk"'),
        ({"scaler": 3}, r"got a int as scaler=\. Pass a torch.amp.GradScaler"),
        ({"minimum": 0}, r"minimum=0 is not a size\. Give a whole number from 1 up"),
        ({"maximum": True}, "maximum=True is not a size"),
        ({"maximum": 2.5}, r"maximum=2\.5 is not a size"),
        ({"maximum": 1, "minimum": 8}, "^maximum=1 is below 8, the fewest"),
        ({"model": 3}, r"got a int as model=\. Pass the nn.Module"),
        ({"model": []}, "got a list as model="),
        ({"fn": _suspended}, "which does not run when it is called"),
        ({"fn": _Generating()}, "which does not run when it is called"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        step(options.pop("fn", torch.sum), samples(), **options)


def test_a_step_inside_a_transform_is_refused():
    def of_weight(weight):
        return step(lambda b: (b * weight).mean(), samples()).loss

    with pytest.raises(AdaptiveUsageError, match=r"inside a transform of torch\.func, and runs b"):
        torch.func.grad(of_weight)(torch.ones(()).double())


def test_more_than_one_value_is_told_to_be_one():
    x = samples()
    with pytest.raises(AdaptiveUsageError, match=r"got 2 values .* Pass step\(fn, \(x, y\)\), and"):
        step(lambda x, y: x.mean(), x, x)
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        step(lambda x, y: x.mean(), (x, x))
    assert caught.value.__notes__[0].startswith("The function of step() gets one argument, the")


def test_a_maximum_below_what_batchnorm_needs_is_refused_and_numbers_may_be_of_numpy():
    net = nn.BatchNorm1d(4).double()
    with pytest.raises(AdaptiveUsageError, match=r"^maximum=1 is below 2, the fewest"):
        step(lambda x: net(x).sum(), samples(), loss="sum", maximum=1, batchnorm="per_chunk")
    net = small_net()
    result = step(lambda b: net(b).mean(), samples(), minimum=np.int64(2), maximum=np.int32(4))
    assert (result.sizes, type(result.micro_batch)) == ((4, 3, 2), int)


# --- errors of the function


def test_an_error_in_a_part_names_what_was_not_split():
    net, x = small_net(), samples()
    y = torch.zeros(len(x), dtype=torch.long)
    with pytest.raises(ValueError, match="to match target batch_size") as caught:
        step(lambda b: nn.functional.cross_entropy(net(b), y), x, maximum=4)
    (note,) = caught.value.__notes__
    assert note.startswith(f"step() ran the function on 4 of {len(x)} samples. Tensors that it")
    assert f"were not split: y (int64[{len(x)}] on cpu, " in note
    assert note.endswith("Pass them in the batch, as in step(fn, (x, y)).")
    fn = lambda b: nn.functional.cross_entropy(net(b[0]), b[1])  # noqa: E731
    with pytest.raises(ValueError, match="to match target batch_size") as caught:
        step(fn, (x, y), maximum=4, in_dims=(0, None))
    assert caught.value.__notes__[0].endswith(" samples. batch[1] (in_dims=None) was not split.")


def test_a_tensor_of_an_attempt_that_was_kept_outside_says_how_to_return_it():
    kept, net = [], small_net()

    def fn(b):
        kept.append(net(b))
        out_of_memory_above(4)(len(b))
        return kept[-1].mean()

    step(fn, samples())
    with pytest.raises(DisposedTensorError, match="The attempt that made it was taken") as caught:
        kept[0].sum()
    assert "has_aux=True of step()" in str(caught.value)
    assert "detach_from_scope" not in str(caught.value)


def test_a_failed_attempt_leaves_a_batch_that_requires_no_grad():
    net, x = small_net(), samples(20)

    def fn(b):
        b.requires_grad_()
        if len(b) > 10:
            net(b).sum().backward()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        (slope,) = torch.autograd.grad(net(b).sum(), b, create_graph=True)
        return slope.square().mean()

    assert step(fn, x).sizes == (10, 10)
    assert not x.requires_grad
    assert x.grad is None
