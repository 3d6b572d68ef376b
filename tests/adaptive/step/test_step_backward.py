"""`step(..., backward=)`: the user's own way to run backward scales everything, and once."""

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, SplitMismatchError, step

from ..attempt.failures import out_of_memory_above
from ..unchanged import unchanged
from .step_cases import (
    LOSSES,
    compare,
    contrastive,
    gradients,
    made,
    samples,
    small_net,
    squares,
    wanted_of,
)


class Accumulating:
    """Divides as accelerate does, and counts."""

    def __init__(self, scale=0.25, **options):
        self.scale, self.options, self.got = scale, options, []

    def __call__(self, loss):
        assert loss.dim() == 0
        self.got.append(loss.item())
        (loss * self.scale).backward(**self.options)


def with_scaler(loss):
    """As accelerate does with float16: a division, and a scaler that has its scale on first use."""
    torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss / 3).backward()


BACKWARDS = {
    "a third and a scaler": (with_scaler, 2.0**16 / 3),
    "in place": (lambda loss: loss.mul_(0.25).backward(), 0.25),
    "keeping graphs": (Accumulating(2.0, retain_graph=True), 2.0),
}
PLAIN = None, 1.0


@pytest.mark.parametrize(
    ("loss", "model", "backward"),
    [
        *[(loss, "MLP", "in place") for loss in LOSSES],
        ("mean", "sparse embedding", "a third and a scaler"),
        ("terms with a count each", "MLP", "a third and a scaler"),
        ("contrastive", "MLP", "a third and a scaler"),
        ("terms with a count each", "MLP", "keeping graphs"),
    ],
)
def test_gradients_are_those_of_the_whole_batch_scaled_once(loss, model, backward):
    function, scale = BACKWARDS[backward]
    case = LOSSES[loss]
    net, batch = made(model, 11, seed=3)
    fn = lambda b: case.fn(net(b["x"]), b["y"])  # noqa: E731
    for maximum in (4, 11):
        whole = case.plain(net(batch["x"]), batch["y"])
        options = {"maximum": maximum, "backward": function, **case.options}
        compare(net, whole, fn, batch, scale, **options)


# losses that have something to train of their own, plain and for `step`
TRAINED = {
    "a callable loss and once": (
        lambda o, t: contrastive(o * t) + t.square(),
        lambda o: o,
        lambda t: {"loss": lambda o: contrastive(o * t), "once": t.square},
    ),
    "then of one mean": (
        lambda o, t: o.square().mean().sqrt() * t.exp(),
        lambda o: o.square().mean(),
        lambda t: {"then": lambda mean: mean.sqrt() * t.exp()},
    ),
    "then of two terms": (
        lambda o, t: o.square().mean() * t + o.abs().mean().log(),
        lambda o: {"square": o.square().mean(), "abs": o.abs().mean()},
        lambda t: {"then": lambda terms: terms["square"] * t + terms["abs"].log()},
    ),
    "once": (
        lambda o, t: o.square().mean() + t.square(),
        lambda o: o.square().mean(),
        lambda t: {"once": t.square},
    ),
}


@pytest.mark.parametrize("backward", [PLAIN, *BACKWARDS.values()])
@pytest.mark.parametrize("loss", TRAINED)
def test_gradients_of_the_loss_itself_of_the_batch_and_of_hooks_are_scaled_once(loss, backward):
    function, scale = backward
    net, x, seen = small_net(), samples(9).requires_grad_(), []
    net[0].weight.register_hook(seen.append)
    # no parameter of a module
    temperature = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    plain, fn, options = TRAINED[loss]
    for maximum in (4, 9):
        whole = plain(net(x), temperature)
        own = torch.autograd.grad(whole * scale, [temperature, x], retain_graph=True)
        temperature.grad = x.grad = None
        seen.clear()
        given = {"maximum": maximum, "backward": function, **options(temperature)}
        compare(net, whole, lambda b: fn(net(b)), x, scale, **given)
        # by the whole, and by the step
        both = [2 * each for each in own]
        torch.testing.assert_close([temperature.grad, x.grad], both, rtol=1e-10, atol=1e-15)
        torch.testing.assert_close(*seen)


def test_each_micro_batch_gives_one_scalar_and_trials_give_none():
    net, x = small_net(), samples(9)
    check, backward = out_of_memory_above(4), Accumulating()
    result = step(squares(net), x, backward=backward)
    assert backward.got == [float(result.loss)]
    backward.got.clear()
    result = step(lambda b: check(len(b)) or net(b).square().mean(), x, backward=backward)
    assert len(backward.got) == len(result.sizes) > 1
    assert sum(backward.got) == pytest.approx(float(result.loss), rel=1e-12)
    backward.got.clear()
    # a loss of outputs that trains nothing is not passed on
    step(lambda b: net(b), x, loss=contrastive, maximum=4, backward=backward)
    assert len(backward.got) == 3
    # nor is the comparison of a split any of the user's business
    backward.got.clear()
    with pytest.raises(SplitMismatchError):
        step(lambda b: net(b).var(0).sum(), x, maximum=4, backward=backward)
    assert backward.got == []


def test_a_loss_in_half_precision_stays_what_it_is():
    net, seen = nn.Linear(4, 1).bfloat16(), []
    step(
        lambda b: net(b).mean(), torch.randn(4, 4).bfloat16(),
        backward=lambda loss: seen.append(loss.dtype) or loss.backward(),
    )  # fmt: skip
    assert seen == [torch.bfloat16]


def test_complex_outputs_get_their_gradient():
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.complex128)
    x = torch.randn(9, 4, dtype=torch.complex128)

    def loss_of(out):
        return (out * (1 + 2j)).real.square().mean() + out.imag.std()

    options = {"loss": loss_of, "maximum": 4, "backward": Accumulating()}
    compare(net, loss_of(net(x)), net, x, 0.25, **options)


@pytest.mark.parametrize("kind", ["terms", "outputs"])
def test_a_large_scale_reaches_half_precision_finite(kind):
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).half(), torch.randn(9, 4).half()

    # gradients that fit in half precision, and a scale that does not
    def loss_of(out):
        return out.float().square().mean() * 1e-3

    options = {} if kind == "terms" else {"loss": loss_of}
    fn = net if kind == "outputs" else lambda b: loss_of(net(b))
    wanted = wanted_of(net, loss_of(net(x)) * 2.0**17)
    step(fn, x, maximum=4, backward=Accumulating(2.0**17), **options)
    assert all(grad.isfinite().all() for grad in gradients(net).values())
    torch.testing.assert_close(gradients(net), wanted, rtol=2e-2, atol=1e-2)


def test_a_backward_that_runs_out_of_memory_is_tried_again_and_what_it_keeps_outlives_that():
    net, x = small_net(), samples(9)
    check, length = out_of_memory_above(4), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def fn(b):
        length.append(len(b))
        return net(b).square().mean()

    def backward(loss):
        scaler.scale(loss).backward()
        check(length[-1])

    assert compare(net, fn(x), fn, x, 8, backward=backward).attempts > 1
    assert scaler.get_scale() == 8.0


# --- errors


def _fused(loss, net, x):
    loss.backward()
    torch.optim.SGD(net.parameters(), 1.0).step()


NO_PASS = r"backward= of step\(\), 'wrong_backward', ran no backward pass from the loss"
FACTOR = "'wrong_backward', multiplied the gradients of one micro-batch by"


@pytest.mark.parametrize(
    ("wrong", "maximum", "message"),
    [
        (lambda loss, net, x: None, 4, NO_PASS),
        (lambda loss, net, x: None, 9, NO_PASS),
        (lambda loss, net, x: net(x).mean().backward(), 9, NO_PASS),
        (_fused, 9, r"SGD\.step\(\) was called inside step\(\)"),
        (lambda loss, net, x: (loss**2).backward(), 4, FACTOR),
    ],
)
def test_a_backward_that_does_something_else_is_refused_and_changes_nothing(
    wrong, maximum, message
):
    net, x = small_net(), samples(9)

    def wrong_backward(loss):
        wrong(loss, net, x)

    with unchanged(net), pytest.raises(AdaptiveUsageError, match=message):
        step(squares(net), x, maximum=maximum, backward=wrong_backward)
