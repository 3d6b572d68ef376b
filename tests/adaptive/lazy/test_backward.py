"""Ways to run backward, and where the gradients go."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, lazy
from tests.needs import needs_torch

from .programs import RoomFor, assert_same_gradients, batch, gradients, mlp

pytestmark = [pytest.mark.usefixtures("forgetful"), pytest.mark.parametrize("room", [None, 3])]
SEED = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


def _two_backwards(out):
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()


PROGRAMS = {
    "gradient": lambda model, x: model(x).backward(gradient=SEED),
    "gradient of a number": lambda model, x: model(x).sum().backward(torch.tensor(3.0).double()),
    "retain_graph": lambda model, x: _two_backwards(model(x)),
    "accumulated": lambda model, x: [model(x).sum().backward(), model(x).mean().backward()],
}


# older ones pass over torch functions in it, so that recorded tensors are refused in other words
NEEDS = needs_torch("2.11", "torch functions of torch.autograd.backward")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_way_gives_the_gradients_of_plain_tensors(program, room):
    model, (x, _) = mlp(), batch()
    assert_same_gradients(model, lambda wrap: program(model, wrap(x)) and None, room)


REFUSED = {
    "torch.autograd.backward": (
        lambda out: torch.autograd.backward([out.sum(), out], [None, SEED]),
        r"torch.autograd.backward\(\) wants the graph of the whole batch",
    ),
    "inputs": (
        lambda out: out.sum().backward(inputs=[nn.Parameter(SEED)]),
        r"backward\(inputs=\) wants the graph of the whole batch",
    ),
    "autograd.grad": (
        lambda out: torch.autograd.grad(out.sum(), [nn.Parameter(SEED)]),
        r"torch.autograd.grad\(\) wants the graph of the whole batch",
    ),
    "create_graph": (
        lambda out: out.sum().backward(create_graph=True),
        r"backward\(create_graph=True\) wants the graph of the whole batch",
    ),
    "hook": (lambda out: out.register_hook(print), r"register_hook\(\) of a tensor of lazy\(\)"),
    "retain_grad": (lambda out: out.retain_grad(), r"retain_grad\(\) of a tensor of lazy\(\)"),
    "value": (
        lambda out: (out.value() * 2).sum().backward(),
        r"What value\(\) gave of a tensor of lazy\(\) was run backward",
    ),
}


@pytest.mark.parametrize(
    ("program", "text"),
    [
        pytest.param(*each, id=name, marks=NEEDS if name == "torch.autograd.backward" else ())
        for name, each in REFUSED.items()
    ],
)
def test_what_wants_the_graph_of_the_whole_is_refused_by_name(program, text, room):
    model, (x, _) = mlp(), batch()
    with RoomFor(room or 8):
        out = model(lazy(x))
        with pytest.raises(AdaptiveUsageError, match=text):
            program(out)
        assert gradients(model) == {}
        # and nothing was recorded of it
        out.sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()


def test_gradients_of_a_computed_tensor_and_requires_grad_of_a_recorded_one_are_refused(room):
    x, _ = batch()
    computed = (lazy(x) * 2).requires_grad_()
    computed.square().sum().backward()
    with pytest.raises(AdaptiveUsageError, match="computed of one of lazy"):
        _ = computed.grad
    with pytest.raises(AdaptiveUsageError, match="call it of the plain tensor, before lazy"):
        lazy(x).requires_grad_()


def test_gradients_of_the_batch(room):
    model, (x, _) = mlp(), batch()
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    with RoomFor(room or 8):
        recorded = lazy(given)
        model(recorded).square().sum().backward()
    model(expected).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)
    torch.testing.assert_close(recorded.grad, expected.grad)


def test_a_batch_that_was_computed_passes_its_gradient_on(room):
    model, (x, _), before = mlp(), batch(), nn.Linear(4, 4).double()

    def program(wrap):
        before.zero_grad()
        model(wrap(before(x))).square().sum().backward()
        return before.weight.grad.clone()

    expected, found = assert_same_gradients(model, program, room)
    torch.testing.assert_close(found, expected)


def test_a_graph_runs_backward_once(room):
    model, (x, _) = mlp(), batch()
    with RoomFor(room or 8):
        out = model(lazy(x))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            out.square().sum().backward()
        # what was cut off is data
        mlp()(out.detach().repeat(1, 2)[:, :4]).sum().backward()


def test_nothing_to_train_is_refused_as_torch_does(room):
    x, _ = batch()
    with pytest.raises(RuntimeError, match="does not require grad"):
        lazy(x).sum().backward()
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        mlp()(lazy(x)).backward()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        mlp()(lazy(x)).backward(torch.ones(2))


def test_autocast_and_no_grad_hold_where_they_were_recorded(room):
    model, (x, y) = mlp().float(), batch()
    x = x.float()

    def program(wrap):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(wrap(x))
            with torch.no_grad():
                factor = out.float().exp().mean(1, keepdim=True)
        assert out.dtype is torch.bfloat16
        (F.cross_entropy(out.float(), y, reduction="none") * factor.squeeze(1)).sum().backward()

    model.zero_grad()
    program(lambda value: value)
    expected = gradients(model)
    model.zero_grad()
    with RoomFor(room or 8):
        program(lazy)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2)


def test_a_scaler_scales(room):
    model, (x, _) = mlp(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def program(wrap):
        scaler.scale(model(wrap(x)).mean()).backward()

    assert_same_gradients(model, program, room)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        return None, None


OWN = {
    "in the middle": lambda model, x: model[2](_Twice.apply(model[0](x))).sum(),
    "with a parameter": lambda model, x: _Product.apply(x, model[0].weight).sum(),
    "at the end": lambda model, x: _Twice.apply(model(x).sum()),
    "reentrant checkpoint": lambda model, x: checkpoint(
        model[2], model[0](x), use_reentrant=True
    ).sum(),
    "value": lambda model, x: _Product.apply(x, model[0].weight).value().sum(),
}


@pytest.mark.parametrize("program", OWN.values(), ids=OWN)
def test_functions_with_a_backward_of_their_own_are_refused_by_name(program, room):
    model, (x, _) = mlp(), batch()
    with pytest.raises(AdaptiveUsageError, match=r"_Twice|_Product|CheckpointFunction"):
        program(model, lazy(x)).backward()
    assert gradients(model) == {}


def test_functions_of_autograd_that_nothing_trains_through_are_recorded(room):
    x, _ = batch()
    model = mlp()

    def program(wrap):
        model(_Twice.apply(wrap(x))).sum().backward()

    assert_same_gradients(model, program, room)


def test_backward_hooks_of_modules_are_refused_by_name(room):
    model, (x, _) = mlp(), batch()
    model[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(AdaptiveUsageError, match="BackwardHookFunction"):
        model(lazy(x)).sum().backward()


def test_checkpoints_that_are_not_reentrant_give_the_same(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        checkpoint(model, wrap(x), use_reentrant=False).square().sum().backward()

    assert_same_gradients(model, program, room)


def test_compiled_modules_run_as_they_are_written(room):
    model, (x, _) = mlp(), batch()
    compiled = torch.compile(model, backend="eager")

    def program(wrap):
        compiled(wrap(x)).square().mean().backward()

    assert_same_gradients(model, program, room)
    # and once more, now that code is there for plain tensors
    assert_same_gradients(model, program, room)


def test_batches_of_two_sizes_that_meet_run_whole(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        (model(wrap(x)).sum() + model(wrap(x[:5])).sum()).backward()

    if room is None:
        assert_same_gradients(model, program)
    else:
        with RoomFor(room), pytest.raises(OutOfRetriesError, match="of 8 and of 5 samples"):
            program(lazy)


def test_two_models_take_turns(room):
    """A generator and a discriminator: what one gives is detached for the other."""
    first, second, (x, _) = mlp(n_out=4), mlp(), batch()

    def program(wrap):
        fake = first(wrap(x))
        second(fake.detach()).square().mean().backward()
        second.zero_grad()
        second(fake).mean().backward()
        return [p.grad.clone() for p in first.parameters()]

    first.zero_grad()
    expected, _ = assert_same_gradients(second, program), first.zero_grad()
    for found, wanted in zip(expected[1], expected[0], strict=True):
        torch.testing.assert_close(found - wanted, wanted)
