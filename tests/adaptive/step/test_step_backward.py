"""`step(..., backward=)`: the user's own way to run backward scales everything, and once."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, SplitMismatchError, step

from ..attempt.failures import out_of_memory_above
from .step_cases import LOSSES, contrastive, gradients, made, samples, small_net, worst_error


class Accumulating:
    """Divides as accelerate does, and counts."""

    def __init__(self, scale=0.25, **options):
        self.scale = scale
        self.options = options
        self.got = []

    def __call__(self, loss):
        assert loss.dim() == 0
        self.got.append(loss.item())
        (loss * self.scale).backward(**self.options)


def with_scaler(loss):
    """As accelerate does with float16: a division, and a scaler that has its scale on first use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(loss / 3).backward()


def writing(loss):
    """Writes into what it got."""
    loss.mul_(0.25).backward()


BACKWARDS = {
    "a quarter": (Accumulating(), 0.25),
    "a third and a scaler": (with_scaler, 2.0**16 / 3),
    "in place": (writing, 0.25),
    "keeping graphs": (Accumulating(2.0, retain_graph=True), 2.0),
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", ["MLP", "sparse embedding"])
def test_gradients_are_those_of_the_whole_batch_scaled_once(model, loss, backward):
    function, scale = BACKWARDS[backward]
    case = LOSSES[loss]
    net, batch = made(model, 11, seed=3)
    plain = case.plain(net(batch["x"]), batch["y"])
    (plain * scale).backward()
    wanted = gradients(net)
    for maximum in (4, 11):
        net.zero_grad()
        result = step(
            lambda b: case.fn(net(b["x"]), b["y"]),
            batch,
            maximum=maximum,
            backward=function,
            **case.options,
        )
        assert worst_error(gradients(net), wanted) < 1e-10
        assert float(result.loss) == pytest.approx(plain.item(), rel=1e-10)


def trained_losses(temperature):
    """Losses that have something to train of their own, plain and for `step`."""
    return {
        "a callable loss": (
            lambda o: contrastive(o * temperature),
            lambda o: o,
            {"loss": lambda o: contrastive(o * temperature)},
        ),
        "then of one mean": (
            lambda o: o.square().mean().sqrt() * temperature.exp(),
            lambda o: o.square().mean(),
            {"then": lambda mean: mean.sqrt() * temperature.exp()},
        ),
        "then of two terms": (
            lambda o: o.square().mean() * temperature + o.abs().mean().log(),
            lambda o: {"square": o.square().mean(), "abs": o.abs().mean()},
            {"then": lambda terms: terms["square"] * temperature + terms["abs"].log()},
        ),
        "once": (
            lambda o: o.square().mean() + temperature.square(),
            lambda o: o.square().mean(),
            {"once": lambda: temperature.square()},
        ),
        "a callable loss and once": (
            lambda o: contrastive(o * temperature) + temperature.square(),
            lambda o: o,
            {
                "loss": lambda o: contrastive(o * temperature),
                "once": lambda: temperature.square(),
            },
        ),
    }


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("loss", trained_losses(None))
def test_what_the_loss_trains_itself_is_scaled_once(loss, backward):
    function, scale = BACKWARDS[backward]
    net, x = small_net(), samples(9)
    temperature = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    plain, fn, options = trained_losses(temperature)[loss]
    whole = plain(net(x))
    (whole * scale).backward()
    wanted = gradients(net), temperature.grad
    for maximum in (4, 9):
        net.zero_grad()
        temperature.grad = None
        result = step(lambda b: fn(net(b)), x, maximum=maximum, backward=function, **options)
        assert worst_error(gradients(net), wanted[0]) < 1e-10
        assert torch.allclose(temperature.grad, wanted[1], rtol=1e-10)
        assert torch.allclose(result.loss, whole, rtol=1e-10)


def test_a_batch_that_fits_gives_its_loss_and_nothing_else():
    net, x = small_net(), samples(9)
    backward = Accumulating()
    result = step(lambda b: net(b).square().mean(), x, backward=backward)
    assert backward.got == [float(result.loss)]


def test_each_micro_batch_gives_one_scalar_and_trials_give_none():
    net, x = small_net(), samples(9)
    check, backward = out_of_memory_above(4), Accumulating()

    def fn(b):
        check(len(b))
        return net(b).square().mean()

    result = step(fn, x, backward=backward)
    assert len(result.sizes) > 1
    assert len(backward.got) == len(result.sizes)
    assert sum(backward.got) == pytest.approx(float(result.loss), rel=1e-12)


def test_a_loss_of_outputs_that_trains_nothing_is_not_passed_on():
    net, x = small_net(), samples(9)
    backward = Accumulating()
    step(lambda b: net(b), x, loss=contrastive, maximum=4, backward=backward)
    assert len(backward.got) == 3


def test_gradients_of_the_batch_are_scaled_once():
    net, raw = small_net(), samples(9).requires_grad_()

    def loss_of(b):
        return net(b).square().mean()

    (loss_of(raw.tanh()) * 0.25).backward()
    wanted, raw.grad = raw.grad, None
    for maximum in (4, 9):
        step(lambda b: loss_of(b.tanh()), raw, maximum=maximum, backward=Accumulating())
        assert torch.allclose(raw.grad, wanted, rtol=1e-10)
        raw.grad = None


def test_complex_outputs_get_their_gradient():
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.complex128)
    x = torch.randn(9, 4, dtype=torch.complex128)

    def loss_of(out):
        return (out * (1 + 2j)).real.square().mean() + out.imag.std()

    (loss_of(net(x)) * 0.25).backward()
    wanted = gradients(net)
    net.zero_grad()
    step(lambda b: net(b), x, loss=loss_of, maximum=4, backward=Accumulating())
    assert worst_error(gradients(net), wanted) < 1e-10


@pytest.mark.parametrize("kind", ["terms", "outputs"])
def test_a_large_scale_reaches_half_precision_finite(kind):
    torch.manual_seed(0)
    net = nn.Linear(4, 3).half()
    x = torch.randn(9, 4).half()
    # gradients that fit in half precision, and a scale that does not
    options = {} if kind == "terms" else {"loss": lambda o: o.float().square().mean() * 1e-3}

    def fn(b):
        out = net(b)
        return out if kind == "outputs" else out.float().square().mean() * 1e-3

    step(fn, x, maximum=4, backward=Accumulating(2.0**17), **options)
    split = gradients(net)
    net.zero_grad()
    (net(x).float().square().mean() * 1e-3 * 2.0**17).backward()
    assert all(grad.isfinite().all() for grad in split.values())
    assert all(torch.allclose(split[k], g, rtol=2e-2, atol=1e-2) for k, g in gradients(net).items())


def test_one_graph_is_alive_also_where_backward_keeps_graphs():
    net, x = small_net(), samples(9)
    alive, most = weakref.WeakSet(), []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            alive.add(ctx)
            most.append(len(alive))
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    step(
        lambda b: Marked.apply(net(b)).square().mean(),
        x,
        maximum=2,
        verify=False,
        backward=Accumulating(retain_graph=True),
    )
    assert max(most) == 1


def test_accumulated_gradients_are_added_to():
    net, x = small_net(), samples(9)
    for _ in range(2):
        step(lambda b: net(b).square().mean(), x, maximum=4, backward=Accumulating(0.5))
    got = gradients(net)
    net.zero_grad()
    net(x).square().mean().backward()
    assert worst_error(got, gradients(net)) < 1e-10


# --- errors


def nothing(loss):
    pass


@pytest.mark.parametrize("maximum", [4, 9])
def test_a_backward_that_does_nothing_is_named(maximum):
    net, x = small_net(), samples(9)
    with pytest.raises(
        AdaptiveUsageError,
        match=r"backward= of step\(\), 'nothing', ran no backward pass from the loss that it got",
    ):
        step(lambda b: net(b).mean(), x, maximum=maximum, backward=nothing)
    assert all(p.grad is None for p in net.parameters())


def test_a_backward_of_another_loss_is_no_backward_of_this_one():
    net, x = small_net(), samples(9)

    def other(loss):
        net(x).mean().backward()

    with pytest.raises(AdaptiveUsageError, match="'other', ran no backward pass"):
        step(lambda b: net(b).mean(), x, backward=other)
    assert all(p.grad is None for p in net.parameters())


def test_a_backward_that_detaches_raises_what_torch_raises():
    net, x = small_net(), samples(9)

    @torch.no_grad()
    def detaching(loss):
        (loss / 4).backward()

    with pytest.raises(RuntimeError, match="does not require grad"):
        step(lambda b: net(b).mean(), x, maximum=4, backward=detaching)
    assert all(p.grad is None for p in net.parameters())


@torch.no_grad()
def test_a_backward_without_grad_mode_is_a_backward():
    net, x = small_net(), samples(9)
    with torch.enable_grad():
        step(lambda b: net(b).mean(), x, maximum=4, backward=torch.no_grad()(torch.Tensor.backward))
        got = gradients(net)
        net.zero_grad()
        net(x).mean().backward()
    assert worst_error(got, gradients(net)) < 1e-10


def test_a_backward_that_steps_an_optimizer_is_refused():
    net, x = small_net(), samples(9)
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def fused(loss):
        loss.backward()
        optimizer.step()

    with pytest.raises(AdaptiveUsageError, match=r"SGD\.step\(\) was called inside step\(\)"):
        step(lambda b: net(b).mean(), x, backward=fused)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_a_backward_that_runs_out_of_memory_is_tried_again_in_smaller_parts():
    net, x = small_net(), samples(9)
    check, length = out_of_memory_above(4), []

    def fn(b):
        length.append(len(b))
        return net(b).square().mean()

    def backward(loss):
        loss.backward()
        check(length[-1])

    result = step(fn, x, backward=backward)
    got = gradients(net)
    assert result.attempts > 1
    net.zero_grad()
    net(x).square().mean().backward()
    assert worst_error(got, gradients(net)) < 1e-10


def test_what_a_backward_keeps_outlives_an_attempt_that_failed():
    net, x = small_net(), samples(9)
    check, length = out_of_memory_above(4), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def fn(b):
        length.append(len(b))
        return net(b).square().mean()

    def backward(loss):
        scaler.scale(loss).backward()
        check(length[-1])

    assert step(fn, x, backward=backward).attempts > 1
    assert scaler.get_scale() == 8.0
    scaler.step(torch.optim.SGD(net.parameters(), 0.1))
    scaler.update()


def test_a_backward_that_is_not_linear_is_refused_where_a_split_is_verified():
    net, x = small_net(), samples(9)
    before = [p.clone() for p in net.parameters()]

    def squared(loss):
        (loss**2).backward()

    with pytest.raises(
        AdaptiveUsageError,
        match=r"backward= of step\(\), 'squared', multiplied the gradients of one micro-batch by",
    ):
        step(lambda b: net(b).square().mean(), x, maximum=4, backward=squared)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_split_that_is_wrong_is_found_although_backward_is_the_users():
    net, x = small_net(), samples(9)
    backward = Accumulating()
    with pytest.raises(SplitMismatchError):
        step(lambda b: net(b).var(0).sum(), x, maximum=4, backward=backward)
    # the comparison is none of the user's business
    assert backward.got == []


def test_a_scaler_beside_a_backward_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"step\(\) got scaler= and backward="):
        step(
            lambda b: b.sum(),
            samples(),
            scaler=torch.amp.GradScaler("cpu"),
            backward=torch.Tensor.backward,
        )


def test_a_backward_that_cannot_be_called_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"step\(\) got a int as backward="):
        step(lambda b: b.sum(), samples(), backward=1)


def test_a_graph_from_before_is_named_as_ever():
    net, x = small_net(), samples(9)
    weight = net[0].weight * 2
    with pytest.raises(AdaptiveUsageError, match=r"a tensor, such as 'weight'.*computed before"):
        step(lambda b: F.linear(b, weight).mean(), x, maximum=4, backward=Accumulating())


def test_hooks_see_the_whole_gradient_scaled_once():
    net, x = small_net(), samples(9)
    seen = []
    net[0].weight.register_hook(seen.append)
    step(lambda b: net(b).square().mean(), x, maximum=4, verify=False, backward=Accumulating())
    assert len(seen) == 1
    assert torch.equal(seen[0], net[0].weight.grad)
