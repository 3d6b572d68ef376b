"""Split steps give the gradients of the unsplit one: every loss, every model, any split."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, step

from ..step_cases import (
    IGNORED,
    LOSSES,
    MODELS,
    ce,
    ce_sum,
    gradients,
    made,
    n_valid,
    worst_error,
)

_EXACT = 1e-10


@st.composite
def partitions(draw):
    """A number of samples, and a smaller one of micro-batches."""
    n_samples = draw(st.integers(2, 17))
    return n_samples, draw(st.integers(1, n_samples - 1))


def compare(model, loss, partition, seed):
    """Run the step plainly and in micro-batches; the error of the gradients."""
    n_samples, maximum = partition
    net, batch = made(model, n_samples, seed)
    case = LOSSES[loss]
    plain = case.plain(net(batch["x"]), batch["y"])
    plain.backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(lambda b: case.fn(net(b["x"]), b["y"]), batch, maximum=maximum, **case.options)
    # a last sample alone gets a partner of the micro-batch before
    assert sum(result.sizes) == n_samples
    assert maximum - 1 <= max(result.sizes) <= maximum
    torch.testing.assert_close(result.loss, plain.detach(), rtol=_EXACT, atol=_EXACT)
    return worst_error(gradients(net), wanted)


@pytest.mark.parametrize("loss", LOSSES)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(partition=partitions(), seed=st.integers(0, 2**16))
def test_each_loss_has_the_gradients_of_the_unsplit_step(loss, partition, seed):
    assert compare("MLP", loss, partition, seed) <= _EXACT


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", ["ignored labels", "terms with a count each", "contrastive"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(partition=partitions(), seed=st.integers(0, 2**16))
def test_each_model_has_the_gradients_of_the_unsplit_step(model, loss, partition, seed):
    assert compare(model, loss, partition, seed) <= _EXACT


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_fits_is_the_plain_step_to_the_bit(loss):
    net, batch = made("MLP", 7, 0)
    case = LOSSES[loss]
    plain = case.plain(net(batch["x"]), batch["y"])
    plain.backward()
    wanted = gradients(net)
    net.zero_grad()
    n_calls = 0

    def fn(b):
        nonlocal n_calls
        n_calls += 1
        assert b is batch
        return case.fn(net(b["x"]), b["y"])

    result = step(fn, batch, **case.options)
    assert (result.sizes, result.micro_batch, result.attempts, n_calls) == ((7,), 7, 1, 1)
    torch.testing.assert_close(result.loss, plain.detach(), rtol=1e-15, atol=0)
    assert worst_error(gradients(net), wanted) <= 1e-15


@pytest.mark.parametrize("maximum", [8, 4])
@pytest.mark.parametrize(
    ("plain", "fn", "options"),
    [
        (F.cross_entropy, F.cross_entropy, {}),
        (lambda o, y: o.mean(), lambda o, y: o.mean(), {}),
        (lambda o, y: F.mse_loss(o, o * 0), lambda o, y: F.mse_loss(o, o * 0), {}),
        (ce, ce, {"weight": n_valid}),
        (lambda o, y: o.abs().sum().log(), lambda o, y: o.abs().sum(), {"then": torch.log}),
        (
            lambda o, y: o.sum(0).abs().sum(),
            lambda o, y: o,
            {"loss": lambda o: o.sum(0).abs().sum()},
        ),
        (lambda o, y: o.sum() ** 2, lambda o, y: o.sum(), {"then": lambda s: s**2}),
    ],
)
def test_the_losses_that_koila_gets_wrong_are_right(maximum, plain, fn, options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    x, y = torch.randn(9, 6, 6, dtype=torch.float64), torch.randint(10, (9,))
    if options.get("weight"):
        y[8] = IGNORED
    plain(net(x), y).backward()
    wanted = gradients(net)
    net.zero_grad()
    options = {"loss": "sum", **options} if "then" in options else options
    step(lambda b: fn(net(b["x"]), b["y"]), {"x": x, "y": y}, maximum=maximum, **options)
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_a_mean_in_16_chunks_is_not_16_times_too_large():
    net, batch = made("MLP", 64, 0)
    net(batch["x"]).square().mean().backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(lambda b: net(b["x"]).square().mean(), batch, maximum=4)
    assert len(result.sizes) == 16
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_a_penalty_on_parameters_counts_once():
    net, batch = made("MLP", 9, 0)

    def penalty():
        return 0.01 * sum(p.square().sum() for p in net.parameters())

    def fn(b):
        return net(b["x"]).exp().sum()

    (fn(batch) + penalty()).backward()
    wanted = gradients(net)
    for maximum in (9, 4):
        net.zero_grad()
        result = step(fn, batch, loss="sum", once=penalty, maximum=maximum)
        assert worst_error(gradients(net), wanted) <= _EXACT
        torch.testing.assert_close(result.loss, (fn(batch) + penalty()).detach())


def test_a_chunk_of_ignored_labels_alone_adds_nothing():
    net, batch = made("MLP", 6, 0)
    batch["y"] = torch.tensor([1, 2, IGNORED, IGNORED, 0, IGNORED])
    ce(net(batch["x"]), batch["y"]).backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(lambda b: ce(net(b["x"]), b["y"]), batch, weight=n_valid, maximum=2)
    assert not result.loss.isnan()
    assert worst_error(gradients(net), wanted) <= _EXACT


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("loss", ["weight", "pair"])
def test_ignored_labels_alone_give_what_the_unsplit_call_gives(loss, verify):
    net, batch = made("MLP", 6, 0)
    batch["y"][:] = IGNORED
    ce(net(batch["x"]), batch["y"]).backward()
    wanted = gradients(net)
    net.zero_grad()
    if loss == "weight":
        result = step(
            lambda b: ce(net(b["x"]), b["y"]), batch, weight=n_valid, maximum=2, verify=verify
        )
    else:
        result = step(
            lambda b: (ce_sum(net(b["x"]), b["y"]), n_valid(b)), batch,
            maximum=2, verify=verify,
        )  # fmt: skip
    assert result.loss.isnan()
    got = gradients(net)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("n_terms", [1, 2])
def test_counts_may_be_made_in_one_tensor_for_all_micro_batches(n_terms):
    net, batch = made("MLP", 9, 0)
    count = torch.zeros(())

    def fn(b):
        out = net(b["x"])
        pair = out.square().sum(), count.fill_(out.numel())
        return {"a": pair, "b": (out.exp().sum(), len(out))} if n_terms == 2 else pair

    plain = net(batch["x"])
    loss = plain.square().mean() + (plain.exp().sum() / 9 if n_terms == 2 else 0)
    loss.backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(fn, batch, maximum=5)
    torch.testing.assert_close(result.loss, loss.detach())
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_a_count_of_zero_gives_what_the_division_gives():
    net, batch = made("MLP", 6, 0)

    def fn(b):
        return net(b["x"]).sum() * 0, torch.tensor(0)

    total, count = fn(batch)
    (total / count).backward()
    wanted = gradients(net)
    net.zero_grad()
    assert step(fn, batch, maximum=2).loss.isnan()
    got = gradients(net)
    assert all(torch.equal(got[k].isnan(), wanted[k].isnan()) for k in wanted)


@pytest.mark.parametrize(
    "count", [math.nan, math.inf, torch.tensor(math.nan), torch.tensor(math.inf)]
)
def test_a_count_that_is_not_finite_gives_what_the_division_gives(count):
    net, batch = made("MLP", 9, 0)
    (net(batch["x"]).sum() / count).backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(lambda b: (net(b["x"]).sum(), count), batch, maximum=4)
    assert result.loss.isnan() if math.isnan(count) else result.loss == 0
    for name, gradient in gradients(net).items():
        torch.testing.assert_close(gradient, wanted[name], equal_nan=True)


def test_what_then_is_made_of_is_trained_too():
    net, batch = made("MLP", 9, 0)
    log_variance = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def then(value):
        return value * torch.exp(-log_variance) + log_variance

    then(net(batch["x"]).square().mean()).backward()
    wanted, wanted_too = gradients(net), log_variance.grad
    net.zero_grad()
    log_variance.grad = None
    step(lambda b: net(b["x"]).square().mean(), batch, then=then, maximum=4)
    assert worst_error(gradients(net), wanted) <= _EXACT
    torch.testing.assert_close(log_variance.grad, wanted_too)


def test_what_a_loss_of_outputs_is_made_of_is_trained_too():
    net, batch = made("MLP", 9, 0)
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def loss(out):
        return F.cross_entropy(out @ out.T * scale, torch.arange(9))

    loss(net(batch["x"])).backward()
    wanted, wanted_too = gradients(net), scale.grad
    net.zero_grad()
    scale.grad = None
    step(lambda b: net(b["x"]), batch, loss=loss, maximum=4)
    assert worst_error(gradients(net), wanted) <= _EXACT
    torch.testing.assert_close(scale.grad, wanted_too)


def test_an_output_that_all_samples_share_gets_its_gradient_once():
    net, batch = made("MLP", 9, 0)
    net.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    net.prototypes = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def fn(b):
        return net(b["x"]), net.scale.exp(), net.prototypes * 2

    def loss(out):
        return (out[0] @ out[2].T * out[1]).logsumexp(0).sum()

    loss(fn(batch)).backward()
    wanted = gradients(net)
    net.zero_grad()
    step(fn, batch, loss=loss, out_dims=(0, 0, None), maximum=3)
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_inputs_under_keys_that_look_the_same_get_their_own_gradients():
    class Key:
        def __repr__(self):
            return "key"

    a, b = Key(), Key()
    batch = {a: torch.ones(5, 2, requires_grad=True), b: torch.ones(5, 2, requires_grad=True)}
    step(lambda part: (part[a] + 3 * part[b]).sum(), batch, loss="sum", maximum=2)
    assert torch.equal(batch[a].grad, torch.ones(5, 2))
    assert torch.equal(batch[b].grad, torch.full((5, 2), 3.0))


@pytest.mark.parametrize("maximum", [9, 4])
@pytest.mark.parametrize("loss", ["mean", "sum and count", "contrastive"])
def test_inputs_that_require_grad_get_the_gradient_of_the_whole(maximum, loss):
    net, batch = made("MLP", 9, 0)
    case = LOSSES[loss]
    leaf = batch["x"].requires_grad_()
    case.plain(net(leaf), batch["y"]).backward()
    wanted, wanted_x = gradients(net), leaf.grad
    net.zero_grad()
    leaf.grad = torch.ones_like(leaf)
    step(lambda b: case.fn(net(b["x"]), b["y"]), batch, maximum=maximum, **case.options)
    assert worst_error(gradients(net), wanted) <= _EXACT
    torch.testing.assert_close(leaf.grad, wanted_x + 1, rtol=_EXACT, atol=_EXACT)


@pytest.mark.parametrize("shares", [False, True])
def test_a_batch_that_was_computed_with_gradients_fits_or_is_refused(shares):
    net, batch = made("MLP", 9, 0)
    encoder = nn.Linear(6, 6).double()

    def features():
        scale = (encoder.weight.exp().sum() / 36).reshape(1)
        return {"x": batch["x"] if shares else encoder(batch["x"]).exp(), "scale": scale}

    def fn(b):
        return (net(b["x"]) * b["scale"]).square().mean()

    fn(features()).backward()
    wanted = gradients(net) | {f"e.{k}": g for k, g in gradients(encoder).items()}
    net.zero_grad()
    encoder.zero_grad()
    step(fn, features(), in_dims={"scale": None}, maximum=9)
    got = gradients(net) | {f"e.{k}": g for k, g in gradients(encoder).items()}
    assert worst_error(got, wanted) <= _EXACT
    with pytest.raises(AdaptiveUsageError, match=r"got .*batch\['scale'\], computed from tensors"):
        step(fn, features(), in_dims={"scale": None}, maximum=4)
    got = gradients(net) | {f"e.{k}": g for k, g in gradients(encoder).items()}
    assert worst_error(got, wanted) <= _EXACT


def test_captured_leaves_get_the_sum_of_all_chunks():
    _, batch = made("linear", 9, 0)
    scale = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (batch["x"] * scale).square().mean().backward()
    wanted, scale.grad = scale.grad, None
    step(lambda b: (b["x"] * scale).square().mean(), batch, maximum=2)
    torch.testing.assert_close(scale.grad, wanted)


def test_a_parameter_that_is_not_used_keeps_no_gradient():
    net, batch = made("MLP", 9, 0)
    net.spare = nn.Linear(2, 2).double()
    step(lambda b: net[:4](b["x"]).square().mean(), batch, maximum=4, model=net)
    assert net.spare.weight.grad is None
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("maximum", [9, 4])
def test_gradients_of_before_are_added_to_in_place(sparse, maximum):
    net, batch = made("sparse embedding" if sparse else "MLP", 9, 0)

    def fn(b):
        return net(b["x"]).square().mean()

    fn(batch).backward()
    fn(batch).backward()
    wanted = gradients(net)
    net.zero_grad()
    fn(batch).backward()
    objects = [id(p.grad) for p in net.parameters()]
    step(fn, batch, maximum=maximum)
    assert [id(p.grad) for p in net.parameters()] == objects
    assert (next(net.parameters()).grad.layout is torch.sparse_coo) == sparse
    assert worst_error(gradients(net), wanted) <= _EXACT


def test_hooks_of_parameters_see_the_gradient_of_the_whole_batch_once():
    net, batch = made("MLP", 9, 0)
    seen = []

    def clipped(gradient):
        seen.append(gradient.clone())
        return gradient.clamp(-1e-3, 1e-3)

    handle = net[0].weight.register_hook(clipped)

    def fn(b):
        return net(b["x"]).square().mean()

    fn(batch).backward()
    wanted, (whole,) = gradients(net), seen
    net.zero_grad()
    seen.clear()
    step(fn, batch, maximum=2)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], whole)
    assert worst_error(gradients(net), wanted) <= _EXACT
    handle.remove()
    assert not net[0].weight._backward_hooks


def test_a_hook_that_takes_itself_away_runs_once_and_stays_away():
    weight = torch.ones(4, requires_grad=True)
    seen = []

    def once(gradient):
        seen.append(gradient)
        handle.remove()

    handle = weight.register_hook(once)
    for _ in range(2):
        step(lambda x: (x * weight).mean(), torch.ones(9, 4), maximum=4)
    assert len(seen) == 1
    assert not weight._backward_hooks


def test_float32_is_near_and_bfloat16_gradients_keep_their_type():
    net, batch = made("MLP", 33, 0)
    net.float()
    batch["x"] = batch["x"].float()
    net(batch["x"]).square().mean().backward()
    wanted = gradients(net)
    net.zero_grad()
    step(lambda b: net(b["x"]).square().mean(), batch, maximum=4)
    assert worst_error(gradients(net), wanted) <= 1e-5
    net.bfloat16().zero_grad()
    batch["x"] = batch["x"].bfloat16()
    result = step(lambda b: net(b["x"]).square().mean(), batch, maximum=4)
    assert net[0].weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(
        result.loss, net(batch["x"]).square().mean().detach().float(), rtol=2e-2, atol=0
    )


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("loss", ["mean", "contrastive"])
def test_autocast_counts_in_forward_alone_around_the_step_or_inside(around, loss):
    net, batch = made("MLP", 12, 0)
    net.float()
    batch["x"] = batch["x"].float()
    case = LOSSES[loss]
    with torch.autocast("cpu", torch.bfloat16):
        plain = case.plain(net(batch["x"]), batch["y"])
    plain.backward()
    wanted = gradients(net)
    seen = []
    net[0].weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))

    def fn(b):
        with torch.autocast("cpu", torch.bfloat16):
            return case.fn(net(b["x"]), b["y"])

    for maximum in (12, 5):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            if around:
                step(lambda b: case.fn(net(b["x"]), b["y"]), batch, maximum=maximum, **case.options)
                assert torch.is_autocast_enabled("cpu")
            else:
                step(fn, batch, maximum=maximum, **case.options)
        assert worst_error(gradients(net), wanted) <= (1e-6 if maximum == 12 and around else 3e-2)
    assert seen[:1] == [False]


@pytest.mark.parametrize(
    "loss", ["mean", "sum and count", "terms with a count each", "contrastive"]
)
@pytest.mark.parametrize("maximum", [9, 4])
def test_a_scaler_finds_the_gradients_scaled_and_the_loss_not(loss, maximum):
    net, batch = made("MLP", 9, 0)
    case = LOSSES[loss]
    case.plain(net(batch["x"]), batch["y"]).backward()
    wanted = gradients(net)
    net.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    result = step(
        lambda b: case.fn(net(b["x"]), b["y"]),
        batch,
        scaler=scaler,
        maximum=maximum,
        **case.options,
    )
    torch.testing.assert_close(result.loss, case.plain(net(batch["x"]), batch["y"]).detach())
    assert float(net[3].bias.grad.abs().max()) > 100 * float(wanted["3.bias"].abs().max())
    scaler.unscale_(optimizer)
    assert worst_error(gradients(net), wanted) <= _EXACT


@pytest.mark.parametrize("maximum", [9, 4])
def test_a_scaler_skips_the_update_when_a_gradient_is_infinite(maximum):
    net, batch = made("MLP", 9, 0)
    batch["x"][5] = 1e308
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = [p.detach().clone() for p in net.parameters()]
    step(lambda b: net[0](b["x"]).square().mean(), batch, scaler=scaler, maximum=maximum)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_half_precision_sum_and_its_count_stay_in_range():
    net = nn.Linear(4, 1, bias=False).half()
    torch.nn.init.ones_(net.weight)
    x = torch.ones(4096, 4, dtype=torch.float16)

    def fn(b):
        return net(b).float().sum(), len(b)

    step(fn, x, scaler=torch.amp.GradScaler("cpu", init_scale=256.0), maximum=1024)
    assert torch.equal(net.weight.grad, torch.full((1, 4), 256.0, dtype=torch.float16))
