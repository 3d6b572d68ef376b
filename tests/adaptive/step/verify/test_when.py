"""When a step is verified, and what that costs."""

import itertools
import math
import os
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageWarning, SplitMismatchError, memory_budget, step

from ..step_cases import refused, samples, small_net


def rooted(net):
    return lambda b: F.mse_loss(net(b), b[:, :3]).sqrt()


def extra_samples(n_steps, n=64, maximum=16, change=lambda i, x: x, scale=lambda i: 1, **options):
    """How many samples more than its own each step ran."""
    net, extra = nn.Linear(1, 1), []

    def fn(b):
        extra[-1] += len(b)
        return net(b.unsqueeze(-1)).square().mean() * scale(len(extra))

    for i in range(n_steps):
        extra.append(-n)
        step(fn, change(i, torch.randn(n, 2)), maximum=maximum, **options)
    return extra


def test_the_first_split_calls_are_verified_and_no_other():
    assert extra_samples(5, maximum=64) == [0] * 5
    assert extra_samples(4, verify=False) == [0] * 4
    assert [i + 1 for i, more in enumerate(extra_samples(21)) if more] == [1, 2, 3, 5, 10, 20]


def test_a_mean_over_what_outputs_select_is_refused_before_twice_as_many_calls():
    net = nn.Linear(1, 1)
    net.weight.data.fill_(1)

    def hard_examples(b):
        each = net(b).square()
        return each[each > 1].mean()

    def train(n_calls, bias):
        net.bias.data.fill_(bias)
        for _ in range(n_calls):
            step(hard_examples, torch.randn(32, 1), maximum=8)

    train(10, bias=9.0)
    # some are easy from now on
    train(9, bias=1.0)
    with pytest.raises(SplitMismatchError):
        train(1, bias=1.0)


@pytest.mark.parametrize(("n", "below"), [(20, 1.1), (21, 1.95)])
def test_all_samples_are_compared_in_parts_where_two_fit_without_gradients(n, below):
    net = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 1)).double()

    def masked_mean(b):
        counts = b[:, 0] < below
        return (net(b).square()[:, 0] * counts).sum() / counts.sum().clamp(min=1)

    # the first ones count alike
    x = torch.linspace(0, 2, n, dtype=torch.float64).unsqueeze(1).repeat(1, 4)
    with memory_budget("100KiB"):
        refused(masked_mean, x, maximum=None)


@pytest.mark.parametrize("changes", ["number", "shape", "history"])
def test_what_is_new_in_each_call_costs_no_more_than_a_share(changes):
    held = SimpleNamespace(scale=1.0, history=[])

    def change(i, x):
        if changes == "number":
            held.scale = held.n_steps = i
        elif changes == "history":
            held.history.append({"loss": float(i)})
        return torch.randn(32, 2 + i) if changes == "shape" else x

    extra = extra_samples(130, 32, change=change, scale=lambda i: 1 + held.scale)
    assert [i for i, more in enumerate(extra) if more][:3] == [0, 1, 2]
    others = [more for i, more in enumerate(extra, 1) if i not in (1, 2, 3, 5, 10, 20, 40, 80)]
    assert any(others) or changes != "number"
    assert sum(others) <= 0.03 * 32 * 127


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


@pytest.mark.parametrize("maximum", [1, 2])
def test_a_count_that_stays_is_looked_at_in_few_calls(maximum):
    net, runs = nn.Linear(1, 1), []

    def fn(b):
        runs.append(len(b))
        return net(b).square().sum(), torch.ones(len(b)).sum()

    for _ in range(10):
        step(fn, torch.randn(4, 1), maximum=maximum)
    assert sum(runs) <= 10 * 4 + 5 * 20 + 4


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
    # so is one with another weight, or another reduction
    criterion = nn.CrossEntropyLoss()
    train(criterion)
    with pytest.raises(SplitMismatchError):
        train(nn.CrossEntropyLoss(torch.tensor([0.1, 1.0, 4.0])))
    criterion.reduction = "sum"
    with pytest.raises(SplitMismatchError, match="It is a sum over samples"):
        train(criterion)


def test_a_place_that_was_refused_is_verified_in_each_later_call():
    net, right, wrong = small_net(), samples(16), samples(16)
    right[:, 0], wrong[:, 0] = 1, torch.tensor([1, -1, -1, -1, 1, 1, -1, 1] * 2)

    def fn(b):
        return net(b)[b[:, 0] > 0].square().mean()

    for _ in range(4):
        refused(fn, wrong)
        assert step(fn, right, maximum=4).sizes == (4, 4, 4, 4)


def test_after_a_refusal_batches_of_another_kind_are_verified_in_each_call():
    net, everything, wrong = small_net(), samples(16), samples(16)
    everything[:, 0], wrong[:, 0] = 1, torch.tensor([1, -1, -1, -1, 1, 1, -1, 1] * 2)

    def fn(b):
        counts = b["x"][:, 0] > 0
        return F.cross_entropy(net(b["x"])[counts], b["y"][counts])

    of_one_class, of_three = torch.zeros(16, dtype=torch.long), torch.arange(16) % 3
    for y in (of_three, *[of_one_class] * 3):
        step(fn, {"x": everything, "y": y}, maximum=4)
    refused(fn, {"x": wrong, "y": of_three})
    for _ in range(2):
        refused(fn, {"x": wrong, "y": of_one_class})
        step(fn, {"x": everything, "y": of_one_class}, maximum=4)


def test_after_a_change_the_next_call_is_verified_and_then_the_fifth():
    net, phase, runs = small_net(), {"power": 1}, itertools.count()

    def fn(b):
        next(runs)
        return net(b).square().mean() * phase["power"]

    verified = []
    for i in range(1, 19):
        phase["power"] = 1 if i < 8 else 2
        before = next(runs)
        step(fn, samples(16), maximum=4)
        if next(runs) - before > 5:
            verified.append(i)
    assert verified == [1, 2, 3, 5, 8, 12, 17]


def test_after_a_change_batches_that_are_too_much_alike_are_not_enough():
    net, phase = small_net(), {"is_weighted": False}

    def fn(b):
        weight = torch.tensor([1.0, 1, 4]).double() if phase["is_weighted"] else None
        return F.cross_entropy(net(b["x"]), b["y"], weight)

    def batch(n_classes):
        return {"x": samples(16), "y": torch.arange(16) % n_classes}

    for _ in range(6):
        step(fn, batch(3), maximum=5)
    phase["is_weighted"] = True
    for _ in range(6):
        # of equal weights
        step(fn, batch(2), maximum=5)
    refused(fn, batch(3), maximum=5)


def test_calls_that_failed_do_not_count_as_verified():
    fn, n_calls = rooted(small_net()), []

    def then(mean):
        if len(n_calls) <= 5:
            raise ValueError("not yet")
        return mean

    for _ in range(5):
        n_calls.append(1)
        with pytest.raises(ValueError, match="not yet"):
            step(fn, samples(16), maximum=4, then=then)
    n_calls.append(1)
    refused(fn, samples(16), then=then)


# --- a change that a function holds


@dataclass(slots=True)
class Settings:
    share: float = 1.0


class Hardest(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = SimpleNamespace(losses=[Settings()])

    def forward(self, errors):
        return hardest(errors, self.settings.losses[0].share)


def hardest(errors, share):
    return errors.topk(int(share * len(errors))).values.mean()


def a_variable():
    share = 1.0

    def change():
        nonlocal share
        share = 0.25

    return lambda e: hardest(e, share), change


def a_dict_in_a_dict():
    held = {"loss": {"share": 1.0}}
    return lambda e: hardest(e, held["loss"]["share"]), lambda: held["loss"].update(share=0.25)


def a_tensor():
    held = torch.ones(())
    return lambda e: hardest(e, held), lambda: held.fill_(0.25)


def a_buffer():
    loss = Hardest()
    loss.register_buffer("share", torch.ones(1))
    return (lambda e: hardest(e, loss.share)), lambda: loss.share.fill_(0.25)


def a_buffer_of_a_layer():
    loss = nn.Identity()
    loss.register_buffer("share", torch.ones(1))
    return (lambda e: hardest(loss(e), loss.share)), lambda: loss.share.fill_(0.25)


def a_buffer_that_a_lambda_reaches():
    loss = Hardest()
    loss.register_buffer("share", torch.ones(1))
    held, first_of = SimpleNamespace(first=loss), lambda held: held.first
    return (lambda e: hardest(e, first_of(held).share)), lambda: loss.share.fill_(0.25)


def what_is_trained():
    layer = nn.PReLU(init=1.0, dtype=torch.float64)
    share = lambda: 1.0 if layer.weight.requires_grad else 0.25  # noqa: E731
    return (lambda e: hardest(layer(e), share())), lambda: layer.requires_grad_(False)


def slots_below_a_module():
    loss = nn.Sequential(nn.Identity(), Hardest())
    return loss, lambda: setattr(loss[1].settings.losses[0], "share", 0.25)


def a_text_of_an_object():
    held = SimpleNamespace(kind="mean")
    return lambda e: getattr(e, held.kind)(), lambda: setattr(held, "kind", "sum")


def a_text_of_a_loss_of_torch():
    loss = nn.MSELoss()
    return lambda e: loss(e, e.detach() + 1), lambda: setattr(loss, "reduction", "sum")


def a_closure_of_a_module():
    loss, made = Hardest(), lambda share: lambda e: hardest(e, share)
    loss.forward = made(1.0)
    return loss, lambda: setattr(loss, "forward", made(0.25))


def a_layer():
    return nn.Sequential(nn.Identity()), lambda errors: hardest(errors, 0.25)


def a_hook_of_a_layer():
    loss, change = a_layer()
    hook = lambda module, args, out: change(args[0])  # noqa: E731
    return lambda e: loss(e).mean(), lambda: loss[0].register_forward_hook(hook)


def the_forward_of_a_layer():
    loss, change = a_layer()
    return lambda e: loss(e).mean(), lambda: setattr(loss[0], "forward", change)


def a_number_of_numpy():
    held = SimpleNamespace(share=np.float32(1))
    return lambda e: hardest(e, held.share), lambda: setattr(held, "share", np.float32(0.25))


def a_variable_of_the_environment():
    os.environ["TENURE_SHARE"] = "1.0"
    change = lambda: os.environ.update(TENURE_SHARE="0.25")  # noqa: E731
    return lambda e: hardest(e, float(os.environ["TENURE_SHARE"])), change


HELD = [
    a_variable, a_dict_in_a_dict, a_tensor, a_buffer, slots_below_a_module, a_text_of_an_object,
    a_text_of_a_loss_of_torch, a_closure_of_a_module, a_hook_of_a_layer, the_forward_of_a_layer,
    a_number_of_numpy, a_variable_of_the_environment, a_buffer_of_a_layer, what_is_trained,
    a_buffer_that_a_lambda_reaches,
]  # fmt: skip


@pytest.mark.parametrize("held", HELD)
def test_what_the_function_holds_makes_it_verified_anew_when_it_changes(held):
    net = small_net()
    loss, change = held()

    def fn(b):
        return loss(net(b).square().sum(1))

    for _ in range(5):
        step(fn, samples(16), maximum=4)
    change()
    for _ in range(2):
        refused(fn, samples(16))
    os.environ.pop("TENURE_SHARE", None)


def test_a_number_that_changes_is_seen_beside_one_that_changes_in_each_call():
    net, share = small_net(), 1.0
    net.n_steps = 0

    def fn(b):
        return hardest(net(b).square().sum(1), share)

    for _ in range(60):
        net.n_steps += 1
        step(fn, samples(16), maximum=8)
    share = 0.25
    refused(fn, samples(16), maximum=8)


def test_a_change_is_seen_in_the_last_of_many_trainings_by_one_line():
    def train(changes):
        net, held = small_net(), SimpleNamespace(share=1.0)

        def fn(b):
            return hardest(net(b).square().sum(1), held.share)

        for _ in range(8):
            step(fn, samples(16), maximum=8)
        if changes:
            held.share = 0.25
            refused(fn, samples(16), maximum=8)

    for i in range(30):
        train(changes=i == 29)


# --- a change of the batch, of the declaration, or of the mode


class Net(nn.Linear):
    """Has no mean over samples if it is evaluated."""

    def forward(self, x):
        out = super().forward(x)
        return out if self.training else out - out.mean(0)


# the number comes last: it is no place of its own, and one that was refused is always verified
CHANGES = [
    lambda net, batch, options: options.update(weight=lambda b: b["y"].sum() + 1),
    lambda net, batch, options: net.eval(),
    lambda net, batch, options: batch["y"][::4].fill_(-100),
    lambda net, batch, options: batch.update(x=torch.randn(12, 5, 4)),
    lambda net, batch, options: batch.update(kind="sum"),
    lambda net, batch, options: batch["goal"].requires_grad_(),
    lambda net, batch, options: batch.update(weights=torch.tensor([0.1, 1.0, 4.0])),
    lambda net, batch, options: batch.update(power=2),
]


def test_another_batch_declaration_or_mode_is_verified_anew():
    net, given = Net(4, 3), {"maximum": 4, "in_dims": {"weights": None}}
    x, y, goal = torch.randn(12, 4), torch.randint(3, (12,)), torch.randn(12, 4)
    batch = {"x": x, "y": y, "goal": goal, "weights": torch.ones(3), "kind": "mean", "power": 1}

    def fn(b):
        x = b["x"]
        out = net(x)
        if x.dim() > 2 or b["kind"] == "sum" or b["power"] > 1 or b["goal"].requires_grad:
            return out.sum()
        return F.cross_entropy(out, b["y"], b["weights"])

    for _ in range(66):  # so that a share of the samples is left for what is new
        step(fn, batch, **given)
    for change in CHANGES:
        changed, options = batch | {"y": batch["y"].clone(), "goal": batch["goal"].clone()}, {}
        change(net, changed, options)
        refused(fn, changed, **given, **options)
        net.train()


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, "int32"])
def test_a_mask_that_becomes_ragged_is_verified_anew(kind):
    net, x = small_net(), torch.randn(16, 6, 4, dtype=torch.float64)
    ragged = (torch.arange(6) < torch.tensor([[6], [1], [5], [2]] * 4)).float()
    even = torch.ones_like(ragged)
    if kind is torch.bool:
        even[:, 4:] = 0  # as much of each

    def batch(mask):
        return {"x": x, "mask": np.asarray(mask, kind) if kind == "int32" else mask.to(kind)}

    def fn(b):
        mask = torch.as_tensor(b["mask"]).double()
        return (net(b["x"]).square().mean(-1) * mask).sum() / mask.sum()

    for _ in range(5):
        step(fn, batch(even), maximum=4)
    refused(fn, batch(ragged), maximum=5)


@pytest.mark.parametrize("missing", ["nan", "zero", "below zero", "255"])
def test_the_first_missing_label_is_found_whatever_stands_for_it(missing):
    net, places = small_net(), torch.arange(6)
    marks = {"nan": math.nan, "zero": 0.0, "below zero": -1.0, "255": 255}
    value = marks[missing]

    def fn(b):
        y = b["y"].flatten()
        out = net(b["x"]).flatten(0, 1)
        there = ~y.isnan() if missing == "nan" else (y > 0) & (y != 255)
        return (out[there].mean(-1) - y[there]).square().mean()

    def batch(n_missing):
        y = torch.randint(3, 150, (16, 6)) if missing == "255" else torch.rand(16, 6).double() + 1
        return {"x": samples(96).reshape(16, 6, 4), "y": y.where(places >= n_missing, value)}

    for _ in range(5):
        step(fn, batch(torch.zeros(1)), maximum=4)
    refused(fn, batch(torch.arange(16)[:, None] % 6), maximum=4)


def test_a_mask_that_no_longer_counts_what_labels_do_is_verified_anew():
    net, lengths = small_net(), torch.arange(16)[:, None] % 6 + 1
    given = {"weight": lambda b: b["mask"].sum(), "maximum": 4}

    def batch(first):
        places = torch.arange(6)
        y = torch.randint(3, (16, 6)).where((first <= places) & (places < lengths), -100)
        return {"x": samples(96).reshape(16, 6, 4), "mask": (places < lengths).long(), "y": y}

    def fn(b):
        return F.cross_entropy(net(b["x"]).flatten(0, 1), b["y"].flatten())

    for _ in range(5):
        step(fn, batch(0), **given)
    refused(fn, batch(torch.arange(16)[:, None] % 2 * (lengths // 2)), **given)


def test_items_that_become_of_different_length_are_verified_anew():
    net, given = small_net(), {"in_dims": {"boxes": "items"}, "maximum": 4}

    def fn(b):
        errors = net(b["x"]).square().mean(1)
        n_boxes = [len(each) for each in b["boxes"]]
        return sum(e * n for e, n in zip(errors, n_boxes, strict=True)) / sum(n_boxes)

    def boxes(*numbers):
        return {"x": samples(12), "boxes": [torch.ones(n, 4) for n in numbers]}

    for _ in range(5):
        step(fn, boxes(*[3] * 12), **given)
    refused(fn, boxes(*range(1, 13)), **given)


# --- what it looks at, and what it needs


def test_one_masked_sample_and_one_outlier_of_many_are_seen():
    net, x, y = small_net().float(), torch.randn(64, 4), torch.randint(3, (64,))
    y[37] = -100
    refused(lambda b: F.cross_entropy(net(b["x"]), b["y"]), {"x": x, "y": y}, maximum=16)

    def fn(b):
        out = net(b).square().mean(1)
        return F.relu(out - out.detach().mean() - 3 * out.detach().std()).mean() + out.mean()

    x[33] *= 50
    refused(fn, x, maximum=32)


@pytest.mark.parametrize("n", [2, 5])
def test_few_samples_are_enough(n):
    net = small_net()
    assert sum(step(lambda b: net(b).square().mean(), samples(n), maximum=1).sizes) == n
    refused(rooted(net), samples(n), maximum=1)


def test_a_function_that_runs_on_pairs_alone_is_compared_in_halves():
    net = small_net()

    def paired(b):
        out = net(b).reshape(-1, 2, 3)
        return (out[:, 0] - out[:, 1]).square().mean()

    assert step(paired, samples(12), maximum=4).sizes == (4, 4, 4)
    refused(lambda b: paired(b).sqrt(), samples(12))


def test_a_warning_that_python_shows_once_is_shown_once(recwarn):
    net = small_net()
    # what pytest sets shows each
    warnings.simplefilter("default")

    def fn(b):
        warnings.warn("of the program", UserWarning, stacklevel=1)
        return net(b).square().mean()

    for _ in range(3):
        step(fn, samples(16), maximum=4)
    assert len(recwarn) == 1


def test_what_can_not_be_verified_is_warned_of():
    net = small_net()

    def fn(b):
        if len(b) != 5:
            raise ValueError("five alone")
        return net(b).square().mean()

    with pytest.warns(AdaptiveUsageWarning, match=r"could not verify that 'fn' gives the same"):
        assert step(fn, samples(15), maximum=5).sizes == (5, 5, 5)


def test_a_loss_that_remembers_beside_a_function_that_keeps_is_warned_of():
    net, bank = small_net(), []

    def outputs(b):
        net.kept = net(b)
        return net.kept

    def loss(out):
        bank.append(out.detach())
        return torch.cat([out, *bank]).std()

    with pytest.warns(AdaptiveUsageWarning, match="and it remembers them outside of modules"):
        step(outputs, samples(16), loss=loss, maximum=4)
    del bank[:]
    step(net, samples(16), loss=loss, maximum=4)
    assert len(bank) == 1


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_a_function_that_writes_into_its_batch_finds_it_new_in_each_run(kind):
    net, x = small_net(), samples(12)

    def fn(b):
        b["x"] /= 2
        return net(torch.as_tensor(b["x"])).square().mean()

    batch = {"x": x if kind is torch.Tensor else x.numpy()}
    assert step(fn, batch, maximum=4).sizes == (4, 4, 4)
    refused(lambda b: fn(b).sqrt(), batch)
