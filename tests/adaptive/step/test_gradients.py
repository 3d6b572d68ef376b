"""Split steps give the gradients of the unsplit one: every loss, every model, any split."""

import fractions
import itertools
import math
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tenure.adaptive import AdaptiveUsageError, step
from tests.programs import run_program

from ..unchanged import unchanged
from .step_cases import (
    IGNORED,
    LOSSES,
    MODELS,
    ce,
    ce_sum,
    compare,
    gradients,
    made,
    n_valid,
    wanted_of,
    worst_error,
)

_EXACT = 1e-10


def mean_of(net):
    return lambda b: net(b["x"]).square().mean()


THREE = ("ignored labels", "terms with a count each", "contrastive")


@pytest.mark.parametrize(
    ("model", "loss"),
    [*itertools.product(["MLP"], LOSSES), *itertools.product(MODELS, THREE)],
)
def test_each_model_and_loss_has_the_gradients_of_the_unsplit_step(model, loss):
    case = LOSSES[loss]
    for n_samples, maximum in ((2, 1), (9, 4), (17, 16), (17, 3)):
        net, batch = made(model, n_samples, seed=n_samples)
        whole = case.plain(net(batch["x"]), batch["y"])
        fn = lambda b, net=net: case.fn(net(b["x"]), b["y"])  # noqa: E731
        result = compare(net, whole, fn, batch, maximum=maximum, **case.options)
        # a last sample alone gets a partner of the micro-batch before
        assert sum(result.sizes) == n_samples
        assert maximum - 1 <= max(result.sizes) <= maximum


@pytest.mark.parametrize("verify", [True, False])
def test_a_function_that_differentiates_by_itself_does_so_in_both_passes(verify):
    net, batch = made("MLP", 9, seed=0)
    batch = {"x": batch["x"], "mask": torch.arange(9) % 4 != 0}

    def outputs(b):
        x = b["x"].clone().requires_grad_()
        energies = net(x).square().sum(1)
        forces = torch.autograd.grad(energies.sum(), x, create_graph=True)[0].square().sum(1)
        return energies, forces * b["mask"]

    def terms(b):
        energies, forces = outputs(b)
        return {"e": (energies.sum(), len(energies)), "f": (forces.sum(), b["mask"].sum())}

    def outputs_alone(b):
        # a pass that has failed keeps nothing
        assert all(each() is None for each in failed)
        out = net(b["x"])
        failed[:] = [] if torch.is_grad_enabled() else [weakref.ref(out)]
        return outputs(b)

    failed = []
    of_both = lambda o: o[0].mean() * o[1].mean()  # noqa: E731
    if not verify:
        step(outputs_alone, batch, maximum=4, verify=False, loss=of_both)
        net.zero_grad()
    energies, forces = outputs(batch)
    whole = energies.mean() + forces.sum() / batch["mask"].sum()
    compare(net, whole, terms, batch, maximum=4, verify=verify)
    whole = of_both(outputs(batch))
    compare(net, whole, outputs, batch, maximum=4, verify=verify, loss=of_both)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_fits_is_the_plain_step_to_the_bit(loss):
    net, batch = made("MLP", 7, 0)
    case, n_calls = LOSSES[loss], []
    plain = case.plain(net(batch["x"]), batch["y"])
    wanted = wanted_of(net, plain)

    def fn(b):
        n_calls.append(1)
        assert b is batch
        return case.fn(net(b["x"]), b["y"])

    result = step(fn, batch, **case.options)
    assert (result.sizes, result.micro_batch, result.attempts, n_calls) == ((7,), 7, 1, [1])
    torch.testing.assert_close(result.loss, plain.detach(), rtol=1e-15, atol=0)
    assert worst_error(gradients(net), wanted) <= 1e-15


def test_ignored_labels_alone_give_what_the_unsplit_call_gives():
    net, batch = made("MLP", 6, 0)
    batch["y"] = torch.tensor([1, 2, IGNORED, IGNORED, 0, IGNORED])

    def fn(b):
        return ce(net(b["x"]), b["y"])

    def pair(b):
        return ce_sum(net(b["x"]), b["y"]), n_valid(b)

    # of a chunk, then of all
    compare(net, fn(batch), fn, batch, weight=n_valid, maximum=2)
    batch["y"][:] = IGNORED
    for each, options in ((fn, {"weight": n_valid}), (pair, {})):
        net.zero_grad()
        wanted = wanted_of(net, fn(batch))
        assert step(each, batch, maximum=2, **options).loss.isnan()
        got = gradients(net)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("count", [torch.tensor(0), math.nan, torch.tensor(math.inf)])
def test_a_count_that_is_zero_or_not_finite_gives_what_the_division_gives(count):
    net, batch = made("MLP", 9, 0)
    factor = 0 if count == 0 else 1
    whole = net(batch["x"]).sum() * factor / count
    wanted = wanted_of(net, whole)
    result = step(lambda b: (net(b["x"]).sum() * factor, count), batch, maximum=4)
    torch.testing.assert_close(result.loss, whole.detach(), equal_nan=True)
    torch.testing.assert_close(gradients(net), wanted, equal_nan=True)


@pytest.mark.parametrize("maximum", [4, 9])
@pytest.mark.parametrize("loss", ["sum and count", "contrastive"])
def test_inputs_that_require_grad_get_the_gradient_of_the_whole(maximum, loss):
    net, batch = made("MLP", 9, 0)
    case, leaf = LOSSES[loss], batch["x"].requires_grad_()
    whole = case.plain(net(leaf), batch["y"])
    (wanted,) = torch.autograd.grad(whole, leaf, retain_graph=True)
    fn = lambda b: case.fn(net(b["x"]), b["y"])  # noqa: E731
    compare(net, whole, fn, batch, maximum=maximum, **case.options)
    torch.testing.assert_close(leaf.grad, 2 * wanted, rtol=_EXACT, atol=_EXACT)


def test_a_batch_that_was_computed_with_gradients_fits_or_is_refused():
    net, batch = made("MLP", 9, 0)
    both = nn.ModuleDict({"net": net, "encoder": nn.Linear(6, 6).double()})

    def features():
        scale = (both["encoder"].weight.exp().sum() / 36).reshape(1)
        return {"x": both["encoder"](batch["x"]).exp(), "scale": scale}

    def fn(b):
        return (net(b["x"]) * b["scale"]).square().mean()

    options = {"in_dims": {"scale": None}}
    compare(both, fn(features()), fn, features(), maximum=9, **options)
    with pytest.raises(AdaptiveUsageError, match=r"got .*batch\['scale'\], computed from tensors"):
        step(fn, features(), maximum=4, **options)
    assert not gradients(both)


def test_captured_leaves_get_the_sum_of_all_chunks_and_unused_ones_none():
    net, batch = made("MLP", 9, 0)
    net.spare = nn.Linear(2, 2).double()
    scale = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def fn(b):
        return net[:4](b["x"] * scale).square().mean()

    # which leaves have gradients is compared, too
    (wanted,) = torch.autograd.grad(fn(batch), scale)
    compare(net, fn(batch), fn, batch, maximum=2, model=net)
    torch.testing.assert_close(scale.grad, 2 * wanted, rtol=_EXACT, atol=_EXACT)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("maximum", [4, 9])
def test_gradients_of_before_are_added_to_in_place(sparse, maximum):
    net, batch = made("sparse embedding" if sparse else "MLP", 9, 0)
    fn = mean_of(net)
    wanted = wanted_of(net, 2 * fn(batch))
    fn(batch).backward()
    objects = [id(p.grad) for p in net.parameters()]
    step(fn, batch, maximum=maximum)
    assert [id(p.grad) for p in net.parameters()] == objects
    assert (next(net.parameters()).grad.layout is torch.sparse_coo) == sparse
    assert worst_error(gradients(net), wanted) <= _EXACT
    # and to one whose elements share memory
    net = nn.Linear(4, 3).double()
    prior = net.bias.grad = torch.ones((), dtype=torch.float64).expand(3)
    step(lambda b: net(b).sum(), torch.randn(8, 4).double(), loss="sum", maximum=3)
    assert net.bias.grad is prior
    assert prior.tolist() == [9.0] * 3


def test_hooks_of_parameters_see_the_gradient_of_the_whole_batch_once_and_may_change_it():
    net, batch = made("MLP", 9, 0)
    seen, several = [], []

    def clipped(gradient):
        seen.append(gradient.clone())
        return gradient.clamp(-1e-3, 1e-3)

    net[0].weight.register_hook(clipped)
    torch.autograd.graph.register_multi_grad_hook(
        [net[0].weight, net[0].bias], lambda found: several.append([g.clone() for g in found])
    )
    compare(net, mean_of(net)(batch), mean_of(net), batch, maximum=2)
    assert (len(seen), len(several)) == (2, 2)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(several[1], several[0])


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize(
    ("of", "maximum", "verify"),
    [("before", 8, True), ("before", 4, False), ("parts", 4, True), ("parts", 4, False)],
)
def test_a_function_that_zeroes_gradients_is_refused(of, maximum, verify, by_optimizer):
    net, batch = made("MLP", 8, 0)
    zeroed = torch.optim.SGD(net.parameters()) if by_optimizer else net
    other = nn.Linear(1, 1)

    def fn(b):
        other.zero_grad()
        zeroed.zero_grad()
        return mean_of(net)(b)

    if of == "before":
        mean_of(net)(batch).backward()
    named = r"^zero_grad\(\) was called inside step\(\), which"
    with unchanged(net), pytest.raises(AdaptiveUsageError, match=named):
        step(fn, batch, maximum=maximum, verify=verify)
    zeroed.zero_grad()
    assert not gradients(net)
    step(fn, batch)


def test_a_batch_that_fits_may_be_attacked_by_a_backward_pass_whose_gradients_are_zeroed():
    net, batch = made("MLP", 8, 0)

    def fn(b):
        loss = mean_of(net)(b)
        loss.backward()
        net.zero_grad()
        return mean_of(net)(b)

    compare(net, fn(batch), fn, batch)


IN_EACH_CALL = "registers a hook of a parameter in each call"
OF_PARAMETERS = "1 of the parameters have a hook from register_po"


@pytest.mark.parametrize(
    ("name", "match", "options"),
    [
        ("register_hook", IN_EACH_CALL, {"verify": False}),
        ("register_post_accumulate_grad_hook", OF_PARAMETERS, {"verify": False}),
        # by a flag that the end of a verification takes back
        ("register_hook", IN_EACH_CALL, {}),
    ],
)
def test_hooks_that_each_call_of_the_function_registers_are_refused_in_micro_batches(
    name, match, options
):
    net, batch = made("MLP", 8, 0)
    net.is_ready = False

    def fn(b):
        if not net.is_ready:
            getattr(net[0].weight, name)(lambda *_: None)
            net.is_ready = not options
        return mean_of(net)(b)

    with pytest.raises(AdaptiveUsageError, match=match):
        step(fn, batch, maximum=4, **options)
    assert not gradients(net)
    step(fn, batch, maximum=8)


@pytest.mark.parametrize("verify", [True, False])
def test_a_hook_that_the_first_call_of_the_function_registers_sees_the_whole_gradient(verify):
    net, batch = made("MLP", 9, 0)
    seen, handles = [], []

    def fn(b):
        if not handles:
            handles.append(net[0].weight.register_hook(lambda g: seen.append(1) or g.clamp(max=0)))
        return mean_of(net)(b)

    wanted = wanted_of(net, fn(batch))
    handles.pop().remove()
    step(fn, batch, maximum=4, verify=verify)
    assert len(seen) == 2
    assert worst_error(gradients(net), wanted) < _EXACT


def test_a_hook_that_takes_itself_away_runs_once_and_stays_away():
    net, batch = made("MLP", 9, 0)
    prior = net[0].weight.grad = torch.ones_like(net[0].weight)
    handles = [net[0].weight.register_hook(lambda gradient: handles[0].remove() or gradient * 0)]
    step(mean_of(net), batch, maximum=4)
    assert net[0].weight.grad is prior
    assert torch.equal(prior, torch.ones_like(prior))
    assert not net[0].weight._backward_hooks


# --- types of numbers


def test_float32_is_near_and_bfloat16_gradients_keep_their_type():
    net, batch = made("MLP", 33, 0)
    net.float()
    batch["x"] = batch["x"].float()
    wanted = wanted_of(net, mean_of(net)(batch))
    step(mean_of(net), batch, maximum=4)
    assert worst_error(gradients(net), wanted) <= 1e-5
    net.bfloat16().zero_grad()
    batch["x"] = batch["x"].bfloat16()
    result = step(mean_of(net), batch, maximum=4)
    assert net[0].weight.grad.dtype is torch.bfloat16
    wanted = mean_of(net)(batch).detach().float()
    torch.testing.assert_close(result.loss, wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    ("around", "loss"), [(True, "mean"), (True, "contrastive"), (False, "mean")]
)
def test_autocast_counts_in_forward_alone_around_the_step_or_inside(around, loss):
    net, batch = made("MLP", 12, 0)
    net.float()
    batch["x"] = batch["x"].float()
    case, seen = LOSSES[loss], []

    def cast(enabled=True):
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    with cast():
        plain = case.plain(net(batch["x"]), batch["y"])
    wanted = wanted_of(net, plain)
    net[0].weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))

    def fn(b):
        with nullcontext() if around else cast():
            return case.fn(net(b["x"]), b["y"])

    for maximum in (12, 5):
        net.zero_grad()
        with cast(around):
            step(fn, batch, maximum=maximum, **case.options)
            assert torch.is_autocast_enabled("cpu") == around
        assert worst_error(gradients(net), wanted) <= (1e-6 if maximum == 12 and around else 3e-2)
    assert seen[:1] == [False]


@pytest.mark.parametrize("loss", ["mean", "terms with a count each", "contrastive"])
def test_a_scaler_finds_the_gradients_scaled_and_the_loss_not(loss):
    net, batch = made("MLP", 9, 0)
    case, penalty = LOSSES[loss], lambda: net[0].weight.square().sum()
    for maximum in (4, 9):
        whole = case.plain(net(batch["x"]), batch["y"]) + penalty()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"scaler": scaler, "once": penalty, "maximum": maximum, **case.options}
        compare(net, whole, lambda b: case.fn(net(b["x"]), b["y"]), batch, 1024, **options)


def test_a_half_precision_sum_and_its_count_stay_in_range():
    net = nn.Linear(4, 1, bias=False).half()
    torch.nn.init.ones_(net.weight)
    x = torch.ones(4096, 4, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    step(lambda b: (net(b).float().sum(), len(b)), x, scaler=scaler, maximum=1024)
    assert torch.equal(net.weight.grad, torch.full((1, 4), 256.0, dtype=torch.float16))


# --- weights and counts


@pytest.mark.parametrize(
    ("dtype", "per_sample"), [(torch.bfloat16, 2048), (torch.uint8, 255), (torch.bool, 1)]
)
@pytest.mark.parametrize("n_terms", [1, 2])
def test_counts_of_few_bits_are_summed_in_more(dtype, per_sample, n_terms):
    net = nn.Linear(2, 1).double()
    x = torch.randn(257, 2, dtype=torch.float64)

    def fn(b):
        count = torch.tensor(per_sample if len(b) > 2 else 1).to(dtype)
        terms = {"a": (net(b).sum(), count), "b": (net(b).sum(), len(b))}
        return terms if n_terms == 2 else terms["a"]

    result = step(fn, x, maximum=128, verify=False)  # such a count is none of samples
    assert result.sizes == (128, 127, 2)
    wanted = net(x).detach().sum() / (2 * per_sample + 1)
    torch.testing.assert_close(result.terms["a" if n_terms == 2 else "loss"], wanted)
    wanted = 257 / (2 * per_sample + 1) + (n_terms == 2)
    torch.testing.assert_close(net.bias.grad, torch.tensor([wanted]).double())


NUMBERS = {
    "float": float,
    "fraction": fractions.Fraction,
    "bfloat16 tensor": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "tensors and numbers": lambda n: torch.tensor(n) if n % 2 else n,
    "tensors of two types": lambda n: torch.tensor(n) if n % 2 else torch.tensor(float(n)),
    "numpy array": lambda n: np.array([n]),
    "numpy and python": lambda n: np.int32(n) if n % 2 else n,
}


def compare_numbers(make, device="cpu"):
    """Train with weights and with counts of a kind of number."""
    net, batch = made("MLP", 9, 0)

    def mean(b):
        return net(b["x"]).square().mean()

    def pair(b):
        return mean(b) * len(b["y"]), make(len(b["y"]))

    weight = {"weight": lambda b: make(len(b["y"]))}
    # a mean stays where it is, and a sum is divided where its count is
    for fn, options, where in ((mean, weight, "cpu"), (pair, {}, device)):
        compare(net, mean(batch).to(where), fn, batch, maximum=4, **options)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_kind_of_number_is_taken(number):
    compare_numbers(NUMBERS[number])


def test_weights_on_two_devices_are_read_from_each(sim):
    compare_numbers(lambda n: torch.tensor(n, device="cpu" if n == 2 else "sim"), "sim")


class Refusing(TorchFunctionMode):
    """A device that has no float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.float64 in (*args, *kwargs.values()):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return func(*args, **kwargs)


def test_a_weight_that_is_known_late_needs_no_float64():
    net = torch.nn.Linear(4, 1, device="meta")
    batch = torch.ones(9, 4, device="meta")
    with Refusing():
        step(lambda b: (net(b).sum(), torch.tensor(len(b), device="meta")), batch, maximum=4)
    assert net.weight.grad.shape == (1, 4)


# --- all gradients are delivered, or none


@pytest.mark.slow
def test_an_interrupt_finds_all_gradients_delivered_or_none():
    done = run_program(Path(__file__).with_name("interrupted.py"))
    assert done.returncode == 0, done.stderr
