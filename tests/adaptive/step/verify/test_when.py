"""When a step is verified, what it costs, and what it says."""

import os
import pickle
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.adaptive import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    BatchCoupledError,
    SplitMismatchError,
    memory_budget,
    step,
)

from ...attempt.failures import out_of_memory_above
from ..step_cases import samples, small_net


def counted(n_steps, n=64, maximum=16, **options):
    """How many samples more than its own each step ran."""
    net, extra = small_net(), []

    def fn(b):
        extra[-1] += len(b)
        return net(b).square().mean()

    for _ in range(n_steps):
        extra.append(-n)
        step(fn, samples(n), maximum=maximum, **options)
    return extra


def is_verified_anew(fn, batch, change, n_steps=4, maximum=4, **options):
    """Some steps whose split is right, a change, and a step that is refused."""
    for _ in range(n_steps):
        step(fn, batch, maximum=maximum, **options)
    change()
    with pytest.raises(SplitMismatchError):
        step(fn, batch, maximum=maximum, **options)


def test_a_batch_that_fits_is_not_verified():
    assert counted(5, maximum=64) == [0] * 5


def test_verification_can_be_turned_off():
    assert counted(4, verify=False) == [0] * 4


@pytest.mark.slow
def test_the_first_calls_and_few_of_the_others_are_verified():
    extra = counted(420)
    assert [i + 1 for i, more in enumerate(extra) if more] == [1, 2, 3, 40, 400]
    assert sum(extra[3:]) <= 0.02 * 64 * len(extra[3:])


def test_shapes_that_are_new_in_each_call_cost_no_more():
    net, extra = nn.Linear(1, 1), []

    def fn(b):
        extra[-1] += len(b)
        return net(b.unsqueeze(-1)).square().mean()

    for i in range(200):
        extra.append(-32)
        step(fn, torch.randn(32, 2 + i), maximum=16)
    assert sum(extra[3:]) <= 0.03 * 32 * 197
    assert any(extra[3:])


def test_a_closure_that_is_new_in_each_call_is_one_place():
    net, extra = small_net(), []

    def train(i):
        def fn(b):
            extra[-1] += len(b)
            return net(b).square().mean() * (1 + i)

        step(fn, samples(16), maximum=8)

    for i in range(30):
        extra.append(-16)
        train(i)
    assert sum(more > 0 for more in extra) <= 6


@pytest.mark.slow
def test_a_wrong_loss_is_refused_however_many_right_ones_one_line_has_run():
    batch = {"x": torch.randn(12, 4), "y": torch.randint(3, (12,))}

    def train(criterion):
        net = small_net().float()
        for _ in range(3):
            step(lambda b: criterion(net(b["x"]), b["y"]), batch, maximum=4)

    for _ in range(25):
        train(F.cross_entropy)
    with pytest.raises(SplitMismatchError):
        train(lambda outputs, _: outputs.std(0).sum())


def test_a_function_that_holds_another_text_each_time_is_verified_each_time():
    net, n_run = small_net(), []

    def train(text):
        def fn(b):
            n_run[-1] += len(b)
            return net(b).square().mean() * len(text)

        step(fn, samples(16), maximum=8)

    for i in range(6):
        n_run.append(0)
        train(f"step {i}")
    assert all(n > 16 for n in n_run)


def test_one_line_with_another_criterion_in_its_closure_is_another_place():
    net = small_net().float()
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    weights = torch.tensor([0.1, 1.0, 4.0])
    criteria = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]

    def train(criterion):
        step(lambda b: criterion(net(b["x"]), b["y"]), {"x": x, "y": y}, maximum=4)

    for _ in range(6):
        for criterion in criteria:
            train(criterion)
    with pytest.raises(SplitMismatchError):
        train(nn.CrossEntropyLoss(weights))


def test_one_criterion_that_is_set_to_another_reduction_is_another_place():
    net, criterion = small_net(), nn.MSELoss()
    x = samples(12)

    def train():
        step(lambda b: criterion(net(b), b[:, :3]), x, maximum=4)

    for _ in range(6):
        train()
    criterion.reduction = "sum"
    with pytest.raises(SplitMismatchError, match="It is a sum over samples"):
        train()


@pytest.mark.parametrize("change", ["weight", "mode", "labels"])
def test_another_declaration_mode_or_kind_of_label_is_verified_anew(change):
    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if self.training else out - out.mean(0)

    net = Net(4, 3)
    batch = {"x": torch.randn(12, 4), "y": torch.randint(3, (12,))}
    options = {}

    def fn(b):
        return F.cross_entropy(net(b["x"]), b["y"])

    for _ in range(6):
        step(fn, batch, maximum=4)
    for _ in range(60):  # so that a share of the samples is left for what is new
        step(fn, batch, maximum=4)
    if change == "weight":
        options["weight"] = lambda b: b["y"].sum() + 1
    elif change == "mode":
        net.eval()
    else:
        batch["y"][::4] = -100
    with pytest.raises(SplitMismatchError):
        step(fn, batch, maximum=4, **options)


@pytest.mark.parametrize("change", ["dimensions", "text", "number"])
def test_a_batch_that_selects_another_loss_is_verified_anew(change):
    net = nn.Linear(4, 3)
    batch = {"x": torch.randn(12, 4), "kind": "mean", "power": 1}

    def fn(b):
        out = net(b["x"])
        if b["x"].dim() > 2 or b["kind"] == "sum" or b["power"] > 1:
            return out.sum()
        return out.mean()

    new = {
        "dimensions": {"x": torch.randn(12, 5, 4)},
        "text": {"kind": "sum"},
        "number": {"power": 2},
    }[change]
    # so many that a share of the samples is left for what is new
    is_verified_anew(fn, batch, lambda: batch.update(new), 66)


def rooted(net):
    def fn(b):
        return F.mse_loss(net(b), b[:, :3]).sqrt()

    return fn


def test_a_split_that_was_refused_is_refused_in_each_later_call():
    fn, x = rooted(small_net()), samples(16)
    for _ in range(8):
        with pytest.raises(SplitMismatchError):
            step(fn, x, maximum=4)


def test_a_place_that_was_refused_is_verified_in_each_later_call():
    net, right, wrong = small_net(), samples(16), samples(16)
    right[:, 0], wrong[:, 0] = 1, torch.tensor([1, -1, -1, -1, 1, 1, -1, 1] * 2)

    def fn(b):
        is_counted = b[:, 0] > 0
        return net(b)[is_counted].square().mean()

    for _ in range(6):
        with pytest.raises(SplitMismatchError):
            step(fn, wrong, maximum=4)
        assert step(fn, right, maximum=4).sizes == (4, 4, 4, 4)


def test_a_refused_place_that_can_not_be_compared_any_more_stays_refused():
    net, fewest = small_net(), [1]

    def fn(b):
        if len(b) not in (4, fewest[0]) and fewest[0] > 1:
            raise RuntimeError("not of this size")
        return F.mse_loss(net(b), b[:, :3]).sqrt()

    with pytest.raises(SplitMismatchError) as first:
        step(fn, samples(16), maximum=4)
    fewest[0] = 4
    with pytest.raises(SplitMismatchError) as second:
        step(fn, samples(16), maximum=4)
    assert str(second.value) == str(first.value)


def test_calls_that_failed_do_not_count_as_verified():
    net, n_calls = small_net(), []

    def then(mean):
        if len(n_calls) <= 5:
            raise ValueError("not yet")
        return mean

    for _ in range(5):
        n_calls.append(1)
        with pytest.raises(ValueError, match="not yet"):
            step(rooted(net), samples(16), maximum=4, then=then)
    n_calls.append(1)
    with pytest.raises(SplitMismatchError):
        step(rooted(net), samples(16), maximum=4, then=then)


class Holder:
    share = 1.0


@dataclass(slots=True)
class Settings:
    share: float = 1.0


class Kind(Enum):
    ALL = 1
    HARDEST = 2


class Hardest(nn.Module):
    """A loss of the hardest samples."""

    def __init__(self):
        super().__init__()
        self.share = 1.0

    def forward(self, errors):
        return hardest(errors, self.share)


def hardest(errors, share):
    return errors.topk(int(share * len(errors))).values.mean()


def in_a_closure():
    share = 1.0

    def fn(errors):
        return hardest(errors, share)

    def change():
        nonlocal share
        share = 0.25

    return fn, change


def in_an_attribute():
    held = Holder()
    held.share = 1.0
    return lambda e: hardest(e, held.share), lambda: setattr(held, "share", 0.25)


def in_a_class():
    held = type("Settings", (Holder,), {"share": 1.0})
    return lambda e: hardest(e, held.share), lambda: setattr(held, "share", 0.25)


def in_a_dict():
    held = {"share": 1.0, "name": "hardest"}
    return lambda e: hardest(e, held["share"]), lambda: held.update(share=0.25)


def in_a_list():
    held = [1, 1.0]
    return lambda e: hardest(e, held[1]), lambda: held.__setitem__(1, 0.25)


def in_a_number_of_numpy():
    held = numpy.ones((), "float32")
    return lambda e: hardest(e, held), lambda: held.fill(0.25)


def in_a_tensor():
    held = torch.ones(())
    return lambda e: hardest(e, held), lambda: held.fill_(0.25)


def in_a_module_below():
    loss = nn.Sequential(nn.Identity(), Hardest())
    return lambda e: loss(e), lambda: setattr(loss[1], "share", 0.25)


def in_a_dict_in_a_dict():
    held = {"loss": {"share": 1.0}}
    return lambda e: hardest(e, held["loss"]["share"]), lambda: held["loss"].update(share=0.25)


def in_a_tuple_in_a_list():
    held = [(1.0, None)]
    return lambda e: hardest(e, held[0][0]), lambda: held.__setitem__(0, (0.25, None))


def in_a_namespace_of_a_module():
    class Settled(nn.Module):
        def __init__(self):
            super().__init__()
            self.settings = SimpleNamespace(losses=[Settings()])

        def forward(self, errors):
            return hardest(errors, self.settings.losses[0].share)

    held = Settled()
    return held, lambda: setattr(held.settings.losses[0], "share", 0.25)


def in_a_namespace_of_a_class_of_its_own():
    class Shares(SimpleNamespace):
        pass

    held = Shares(share=1.0)
    return lambda e: hardest(e, vars(held)["share"]), lambda: setattr(held, "share", 0.25)


def in_an_object_whose_method_reads_it():
    class Loss:
        def __init__(self):
            self.share = 1.0

        def of(self, errors):
            return hardest(errors, self.share)

        def __call__(self, errors):
            return self.of(errors)

    held = Loss()
    return held, lambda: setattr(held, "share", 0.25)


def in_a_choice():
    held = SimpleNamespace(kind=Kind.ALL)
    shares = {Kind.ALL: 1.0, Kind.HARDEST: 0.25}

    def change():
        held.kind = Kind.HARDEST

    return lambda e: hardest(e, shares[vars(held)["kind"]]), change


def in_a_mapping_to_read():
    held = {"share": 1.0}
    shown = MappingProxyType(held)
    return lambda e: hardest(e, shown["share"]), lambda: held.update(share=0.25)


def in_a_context_variable():
    held = ContextVar("share", default=1.0)
    return lambda e: hardest(e, held.get()), lambda: held.set(0.25)


HELD = [
    in_a_closure, in_an_attribute, in_a_class, in_a_dict, in_a_list, in_a_number_of_numpy,
    in_a_tensor, in_a_module_below, in_a_dict_in_a_dict, in_a_tuple_in_a_list,
    in_a_namespace_of_a_module, in_a_namespace_of_a_class_of_its_own,
    in_an_object_whose_method_reads_it, in_a_choice, in_a_mapping_to_read, in_a_context_variable,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_a_number_that_the_function_holds_makes_it_verified_anew_when_it_changes(held):
    net = small_net()
    loss, change = held()

    def fn(b):
        return loss(net(b).square().sum(1))

    for _ in range(5):
        step(fn, samples(16), maximum=4)
    change()
    for _ in range(3):
        with pytest.raises(SplitMismatchError):
            step(fn, samples(16), maximum=4)


def test_a_variable_of_the_environment_makes_it_verified_anew_when_it_changes(monkeypatch):
    net = small_net()
    monkeypatch.setenv("TENURE_SHARE", "1.0")

    def fn(b):
        return hardest(net(b).square().sum(1), float(os.environ["TENURE_SHARE"]))

    for _ in range(4):
        step(fn, samples(16), maximum=4)
    monkeypatch.setenv("TENURE_SHARE", "0.25")
    with pytest.raises(SplitMismatchError):
        step(fn, samples(16), maximum=4)


def test_a_function_that_is_an_object_is_verified_anew_when_its_attributes_change():
    class Loss:
        def __init__(self):
            self.net, self.kind = small_net(), "mean"

        def __call__(self, b):
            return getattr(self.net(b).square().sum(1), self.kind)()

    fn = Loss()
    is_verified_anew(fn, samples(16), lambda: setattr(fn, "kind", "sum"))


class Answering:
    """A configuration that answers each name that it does not have."""

    def __getattr__(self, name):
        return self.__dict__.get(name)


class Raising:
    """One whose missing names are errors of a dict."""

    def __getattr__(self, name):
        return self.__dict__[name]


@pytest.mark.parametrize("kind", [Answering, Raising])
def test_an_object_is_not_asked_for_attributes_that_it_does_not_have(kind):
    net, config = small_net(), kind()
    config.scale = 2.0

    def fn(b):
        return config.scale * net(b).square().mean()

    for _ in range(2):
        assert step(fn, samples(16), maximum=8).sizes == (8, 8)


def test_an_image_in_reach_is_no_array():
    class Image:
        size = (2, 2)
        __array_interface__ = None

    net, held = small_net(), {"shown": Image()}
    result = step(lambda b: net(b).square().mean() + 0 * len(held), samples(16), maximum=4)
    assert result.sizes == (4, 4, 4, 4)


def test_a_criterion_below_a_model_that_is_set_to_a_sum_is_verified_anew():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = small_net(), nn.MSELoss()

        def forward(self, b):
            return self.criterion(self.net(b), b[:, :3])

    net = Net()

    def fn(b):
        return net(b)

    is_verified_anew(fn, samples(16), lambda: setattr(net.criterion, "reduction", "sum"))


def test_a_weight_that_changes_is_verified_anew():
    net, is_by_mask = small_net(), True

    def fn(b):
        return (net(b["x"]).square().sum(1) * b["mask"]).sum() / b["mask"].sum()

    def weight(b):
        return b["mask"].sum() if is_by_mask else len(b["x"])

    batch = {"x": samples(16), "mask": torch.rand(16).double()}
    for _ in range(4):
        step(fn, batch, maximum=4, weight=weight)
    is_by_mask = False
    with pytest.raises(SplitMismatchError):
        step(fn, batch, maximum=4, weight=weight)


def test_a_tensor_of_the_batch_that_comes_to_require_grad_is_verified_anew():
    net, batch = small_net(), {"x": samples(16), "goal": samples(16)}

    def fn(b):
        errors = net(b["x"]).square()
        return errors.sum() if b["goal"].requires_grad else errors.mean()

    is_verified_anew(fn, batch, batch["goal"].requires_grad_)


@pytest.mark.slow
def test_an_object_that_keeps_a_history_is_not_verified_for_ever():
    class Trainer:
        def __init__(self):
            self.net, self.n_steps, self.losses, self.log = small_net(), 0, [], {"now": "step 0"}
            self.n_run = []

        def loss(self, b):
            self.n_run[-1] += len(b)
            return self.net(b).square().mean()

    trainer = Trainer()
    for i in range(300):
        trainer.n_run.append(-32)
        trainer.n_steps, trainer.log = i, {"now": f"step {i}", "of": trainer}
        step(trainer.loss, samples(32), maximum=16)
        trainer.losses.append({"loss": float(i)})
    assert sum(trainer.n_run[3:]) <= 0.03 * 32 * 297


def test_a_number_that_changes_is_seen_beside_one_that_changes_in_each_call():
    net, share = small_net(), 1.0
    net.n_steps = 0

    def fn(b):
        return hardest(net(b).square().sum(1), share)

    for _ in range(60):
        net.n_steps += 1
        step(fn, samples(16), maximum=8)
    share = 0.25
    with pytest.raises(SplitMismatchError):
        step(fn, samples(16), maximum=8)


@pytest.mark.slow
def test_numbers_that_change_in_each_call_cost_no_more_than_the_share():
    net, extra, history, held = small_net(), [], [], Holder()
    net.n_steps = 0

    def fn(b):
        extra[-1] += len(b)
        history.append(0.5)
        return net(b).square().mean() * (1 + held.share) + 0 * len(history)

    for i in range(300):
        extra.append(-32)
        held.share, net.n_steps = i, i
        step(fn, samples(32), maximum=16)
    verified = [i + 1 for i, more in enumerate(extra) if more]
    assert verified[:3] == [1, 2, 3]
    assert 1 <= len(verified[3:]) <= 4
    assert sum(extra[3:]) <= 0.03 * 32 * 297


def lengths_mask(kind):
    mask = (torch.arange(6) < torch.tensor([[6], [1], [5], [2]] * 4)).float()
    return numpy.asarray(mask, kind) if isinstance(kind, str) else mask.to(kind)


KINDS = [torch.float32, torch.float64, torch.float16, torch.bool, torch.int64, torch.uint8, "int32"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["ones", "as much of each"])
def test_a_mask_of_any_type_that_becomes_ragged_is_verified_anew(kind, start):
    net = small_net()
    ragged = lengths_mask(kind)
    even = ragged[:1].repeat(16, 1) if torch.is_tensor(ragged) else ragged[:1].repeat(16, 0)
    if start == "as much of each":
        even[:, 4:] = 0
    x = torch.randn(16, 6, 4, dtype=torch.float64)

    def fn(b):
        mask = torch.as_tensor(b["mask"]).double()
        return (net(b["x"]).square().mean(-1) * mask).sum() / mask.sum()

    for _ in range(5):
        step(fn, {"x": x, "mask": even}, maximum=4)
    with pytest.raises(SplitMismatchError):
        step(fn, {"x": x, "mask": ragged}, maximum=5)


def test_weights_that_all_samples_share_are_verified_anew_once_they_differ():
    net = small_net().float()

    def fn(b):
        return F.cross_entropy(net(b["x"]), b["y"], b["weights"])

    batch = {"x": torch.randn(12, 4), "y": torch.randint(3, (12,)), "weights": torch.ones(3)}
    uneven = torch.tensor([0.1, 1.0, 4.0])
    is_verified_anew(fn, batch, lambda: batch.update(weights=uneven), 5, in_dims={"weights": None})


def test_items_that_become_of_different_length_are_verified_anew():
    net = small_net()

    def fn(b):
        errors = net(b["x"]).square().mean(1)
        n_boxes = [len(each) for each in b["boxes"]]
        return sum(e * n for e, n in zip(errors, n_boxes, strict=True)) / sum(n_boxes)

    def boxes(*numbers):
        return {"x": samples(12), "boxes": [torch.ones(n, 4) for n in numbers]}

    for _ in range(5):
        step(fn, boxes(*[3] * 12), in_dims={"boxes": "items"}, maximum=4)
    with pytest.raises(SplitMismatchError):
        step(fn, boxes(*range(1, 13)), in_dims={"boxes": "items"}, maximum=4)


def shared_sparse():
    return torch.randint(1, 3, (3, 3)).to_sparse()


def shared_unsigned():
    return torch.randint(0, 9, (3, 3)).to(torch.uint16)


# torch can't tell the least of either.
@pytest.mark.parametrize("shared", [shared_sparse, shared_unsigned])
def test_a_kind_of_numbers_that_has_no_least_one_is_no_obstacle(shared):
    numbers = shared()
    net = nn.Linear(3, 1)

    def fn(b):
        return net(b["x"] @ b["numbers"].to_dense().float()).mean()

    batch = {"x": torch.randn(4, 3), "numbers": numbers}
    result = step(fn, batch, in_dims={"x": 0, "numbers": None}, maximum=2)
    assert result.sizes == (2, 2)


class _Reads(TorchDispatchMode):
    """Counts how often the host reads a value of a device."""

    def __init__(self):
        super().__init__()
        self.n_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        to = (kwargs or {}).get("device")
        is_copy = func is torch.ops.aten._to_copy.default and to == torch.device("cpu")
        if is_copy or func is torch.ops.aten._local_scalar_dense.default:
            self.n_reads += args[0].device.type == "sim"
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_for_what_kind_of_labels_there_are(sim):
    def n_reads(*names):
        net, on = nn.Linear(2, 1).to(sim.device), sim.device
        leaves = {
            "labels": torch.tensor([5, -100, 2, 1]).to(on),
            "mask": torch.tensor([True, False, True, True]).to(on),
            "lengths": torch.tensor([3, 1, 2, 2], dtype=torch.uint8).to(on),
            "on the host": torch.tensor([0, 0, -1, 2]),
            "none": torch.empty(4, 0, dtype=torch.int64, device=on),
        }
        batch = {"x": torch.ones(4, 2, device=on)} | {name: leaves[name] for name in names}
        for _ in range(4):
            with _Reads() as reads:
                step(lambda b: net(b["x"]).mean(), batch, maximum=2)
        return reads.n_reads

    assert n_reads() == n_reads("labels", "mask", "lengths", "on the host", "none") == 1


def test_one_masked_sample_of_many_is_seen():
    net = small_net().float()
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    y[37] = -100
    with pytest.raises(SplitMismatchError):
        step(lambda b: F.cross_entropy(net(b["x"]), b["y"]), {"x": x, "y": y}, maximum=16)


def test_an_outlier_that_only_the_whole_batch_shows_is_seen():
    net = nn.Linear(4, 3).double()
    x = samples(64)

    def fn(b):
        out = net(b).square().mean(1)
        return F.relu(out - out.detach().mean() - 3 * out.detach().std()).mean() + out.mean()

    x[33] *= 50
    with pytest.raises(SplitMismatchError):
        step(fn, x, maximum=32)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_few_samples_are_enough(n):
    net = small_net()
    assert sum(step(lambda b: net(b).square().mean(), samples(n), maximum=1).sizes) == n
    with pytest.raises(SplitMismatchError):
        step(lambda b: net(b).square().mean().sqrt(), samples(n), maximum=1)


def test_the_error_tells_both_numbers_and_what_to_declare():
    net = small_net()
    x = samples(16)

    def rooted(b):
        return net(b).square().mean().sqrt()

    with pytest.raises(SplitMismatchError) as caught:
        step(rooted, x, maximum=4)
    error = caught.value
    assert str(error) == (
        "The batch of 16 has to be split into micro-batches of 4, and 'rooted' would give other "
        f"results then: the loss for 8 samples is {error.whole:.6g} in one piece and "
        f"{error.split:.6g} as 5 + 3 "
        f"({100 * abs(error.whole - error.split) / error.whole:.2g} % off). Nothing was changed. "
        'It is a function of a mean: return that without the root, and pass loss="mean", '
        "then=torch.sqrt."
    )
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.whole, other.split, other.advice) == (
        str(error), error.whole, error.split, error.advice,
    )  # fmt: skip


ADVICE = {
    "sum": (lambda net, b: net(b["x"]).square().sum(), {}, 'pass loss="sum".'),
    "mean": (
        lambda net, b: net(b["x"]).square().mean(), {"loss": "sum"}, 'leave loss="sum" out.',
    ),
    "weight": (
        lambda net, b: net(b["x"])[b["mask"]].square().mean(), {},
        "weight=lambda batch: batch['mask'].sum()",
    ),
    "no weight": (
        lambda net, b: net(b["x"]).square().mean(),
        {"weight": lambda b: b["mask"].sum()}, "leave weight= out.",
    ),
    "once": (
        lambda net, b: net(b["x"]).square().sum() + net[0].weight.square().sum(),
        {"loss": "sum"}, "Pass a penalty on parameters as once=.",
    ),
    "log": (
        lambda net, b: net(b["x"]).exp().sum().log(), {"loss": "sum"},
        'pass loss="sum", then=torch.log.',
    ),
    "exp": (lambda net, b: net(b["x"]).square().mean().exp(), {}, "then=torch.exp."),
    "outputs": (
        lambda net, b: net(b["x"]).std(), {}, "pass what is computed of all of them as loss=",
    ),
    "function of outputs": (
        lambda net, b: net(b["x"]) - net(b["x"]).mean(0), {"loss": lambda o: o.std()},
        "do the rest in loss=, which gets all outputs.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_is_what_makes_it_right(name):
    fn, options, advice = ADVICE[name]
    net = small_net()
    batch = {"x": samples(16), "mask": torch.rand(16) > 0.5}
    with pytest.raises(SplitMismatchError) as caught:
        step(lambda b: fn(net, b), batch, maximum=4, **options)
    assert advice in caught.value.advice


def test_a_module_that_mixes_samples_is_named():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    net = nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 1))
    with pytest.raises(SplitMismatchError, match=r"net\.1 \(Centred\) mixes the samples"):
        step(lambda b: net(b).square().mean(), torch.randn(12, 4), maximum=4)


def mixed_up(b):
    order = torch.randperm(len(b))
    return 0.3 * b + 0.7 * b[order]


def centred(b):
    return b - b.mean(0)


@pytest.mark.parametrize("mix", [mixed_up, centred])
def test_a_module_is_innocent_of_what_the_function_mixes_before_it(mix):
    net = small_net()

    def fn(b):
        return net(mix(b)).square().mean()

    with pytest.raises(SplitMismatchError) as caught:
        step(fn, samples(12), maximum=5)
    assert caught.value.advice.startswith("Return the outputs, one for each sample")
    assert "Mix samples, as in mixup, before step()." in caught.value.advice
    batch = mix(samples(12))
    assert step(lambda b: net(b).square().mean(), batch, maximum=5).sizes == (5, 5, 2)


class Expert(nn.Module):
    """The expert of a mixture, which gets the rows that are sent to it, as a router orders them."""

    def __init__(self, share):
        super().__init__()
        self.expert, self.share = nn.Linear(4, 4), share

    def forward(self, x):
        order = x[:, 0].sign().argsort(descending=True, stable=True)[: len(x) // self.share]
        return x.index_add(0, order, self.expert(x[order]))


def test_experts_are_innocent_of_the_order_in_which_they_get_samples():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Expert(share=1)).double()
    assert step(lambda b: net(b).square().mean(), samples(12), maximum=5).sizes == (5, 5, 2)
    with pytest.raises(SplitMismatchError) as caught:
        step(lambda b: net(b).std(), samples(12), maximum=5)
    assert caught.value.advice.startswith("Return the outputs, one for each sample")
    # one that gets half of its batch takes others of each micro-batch, in the module around it
    net[1].share = 2
    with pytest.raises(SplitMismatchError, match=r"net\.1 \(Expert\) mixes the samples"):
        step(lambda b: net(b).square().mean(), samples(12), maximum=5)


def test_a_coupled_module_is_named_as_before():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with pytest.raises(BatchCoupledError, match=r"batch of 12 .* micro-batches of 4"):
        step(lambda b: net(b).square().mean(), torch.randn(12, 4), maximum=4)


def test_hooks_of_parameters_see_the_delivered_gradient_alone():
    net, seen = small_net(), []
    net[0].weight.register_hook(lambda g: seen.append(g.clone()))
    step(lambda b: net(b).square().mean(), samples(12), maximum=4)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], net[0].weight.grad)


def test_counters_of_modules_are_those_of_the_micro_batches():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.seen = []

        def forward(self, x):
            self.calls += 1
            self.seen.append(len(x))
            return x

    net = nn.Sequential(nn.Linear(4, 1), Counting())
    step(lambda b: net(b).square().mean(), torch.randn(12, 4), maximum=4)
    assert (net[1].calls, net[1].seen) == (3, [4, 4, 4])


def test_a_scaler_is_not_touched_by_a_loss_that_is_refused():
    net = small_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(SplitMismatchError):
        step(lambda b: net(b).std(), samples(12), maximum=4, scaler=scaler)
    result = step(lambda b: net(b).square().mean(), samples(12), maximum=4, scaler=scaler)
    assert result.sizes == (4, 4, 4)


def test_a_function_that_runs_on_pairs_alone_is_compared_in_halves():
    net = small_net()

    def paired(b):
        out = net(b).reshape(-1, 2, 3)
        return (out[:, 0] - out[:, 1]).square().mean()

    assert step(paired, samples(12), maximum=4).sizes == (4, 4, 4)
    with pytest.raises(SplitMismatchError):
        step(lambda b: paired(b).sqrt(), samples(12), maximum=4)


def test_what_can_not_be_verified_is_warned_of():
    net = small_net()

    def fn(b):
        if len(b) != 5:
            raise ValueError("five alone")
        return net(b).square().mean()

    with pytest.warns(AdaptiveUsageWarning, match=r"could not verify that 'fn' gives the same"):
        assert step(fn, samples(15), maximum=5).sizes == (5, 5, 5)


def test_a_function_that_counts_its_calls_is_left_alone():
    net, calls = small_net(), []

    def fn(b):
        calls.append(len(b))
        return net(b).square().mean() * (1 + 0.5 * len(calls))

    assert step(fn, samples(12), maximum=4).sizes == (4, 4, 4)


@pytest.mark.parametrize("kind", [torch.Tensor, numpy.ndarray])
def test_a_function_that_writes_into_its_batch_finds_it_new_in_each_run(kind):
    net = small_net()

    def fn(b):
        b["x"] /= 2
        return net(torch.as_tensor(b["x"])).square().mean()

    x = samples(12)
    batch = {"x": x if kind is torch.Tensor else x.numpy()}
    assert step(fn, batch, maximum=4).sizes == (4, 4, 4)
    with pytest.raises(SplitMismatchError):
        step(lambda b: fn(b).sqrt(), batch, maximum=4)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_is_verified():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(12, 4)
    assert step(lambda b: compiled(b).square().mean(), x, maximum=4).sizes == (4, 4, 4)
    with pytest.raises(SplitMismatchError):
        step(lambda b: compiled(b).square().mean().sqrt(), x, maximum=4)


def test_a_budget_that_the_micro_batches_keep_is_kept_by_the_verification():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]).double()
    x = torch.randn(512, 64, dtype=torch.float64)
    with memory_budget("1MiB") as budget:
        result = step(lambda b: net(b).square().mean(), x)
        assert len(result.sizes) > 1
        assert budget.peak_bytes <= 2**20
        with pytest.raises(SplitMismatchError):
            step(lambda b: net(b).square().mean().sqrt(), x)


def test_a_function_that_runs_on_one_sample_alone_is_warned_of():
    net, check = small_net(), out_of_memory_above(1)

    def fn(b):
        check(len(b))
        return net(b).square().mean()

    with pytest.warns(AdaptiveUsageWarning, match="could not verify"):
        assert step(fn, samples(4)).sizes == (1, 1, 1, 1)
    assert net[0].weight.grad is not None


def test_the_declaration_is_checked_before_any_of_that():
    with pytest.raises(AdaptiveUsageError, match="got weight= with"):
        step(lambda b: b.sum(), samples(4), loss="sum", weight=len, maximum=2)


def test_a_criterion_that_holds_a_number_of_numpy_is_verified():
    numpy = pytest.importorskip("numpy")
    criterion, model = nn.CrossEntropyLoss(), nn.Linear(4, 3)
    criterion.margin = numpy.float64(0.5)
    batch = {"x": torch.randn(12, 4), "y": torch.randint(3, (12,))}
    step(lambda b: criterion(model(b["x"]), b["y"]), batch, maximum=4)
    with pytest.raises(SplitMismatchError):
        step(lambda b: criterion(model(b["x"]), b["y"]).sqrt(), batch, maximum=4)
