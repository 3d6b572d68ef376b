"""Ways to run backward, and where the gradients go."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, lazy
from tests.needs import needs_torch

from .programs import RoomFor, assert_same_gradients, batch, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
ROOMS = pytest.mark.parametrize("room", [None, 3])
SEED = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


class Twice(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _two_backwards(model, x):
    out = model(x)
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()


def _scaled(model, x):
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(model(x).mean()).backward()


def _without_grad(model, x):
    out = model(x)
    with torch.no_grad():
        factor = out.exp().mean(1, keepdim=True)
    (out * factor).sum().backward()


def _compiled(model, x):
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):  # once more, when code is there
        compiled(x * 1).square().mean().backward()


PROGRAMS = {
    "gradient": lambda model, x: model(x).backward(gradient=SEED),
    "gradient of a number": lambda model, x: model(x).sum().backward(torch.tensor(3.0).double()),
    "retain_graph": _two_backwards,
    "accumulated": lambda model, x: [model(x).sum().backward(), model(x).mean().backward()],
    "scaled": _scaled,
    "a factor without gradients": _without_grad,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).sum().backward(),
    "compiled": _compiled,
    "a function that nothing trains through": lambda model, x: (
        model(Twice.apply(x)).sum().backward()
    ),
}


@ROOMS
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_way_gives_the_gradients_of_plain_tensors(program, room):
    model, (x, _) = mlp(), batch()
    assert_same_gradients(model, lambda wrap: program(model, wrap(x)) and None, room)


# older ones pass over torch functions in it, so that recorded tensors are refused in other words
NEEDS = needs_torch("2.11", "torch functions of torch.autograd.backward")
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
    "function": (lambda out: Twice.apply(out).sum().backward(), "came out of 'Twice'"),
    "value of a function": (
        lambda out: Twice.apply(out).value().sum().backward(),
        "came out of 'Twice'",
    ),
    "reentrant checkpoint": (
        lambda out: checkpoint(nn.Linear(3, 1).double(), out, use_reentrant=True).sum(),
        r"came out of 'Checkpoint.*use_reentrant=False",
    ),
    "statistics in a checkpoint": (
        lambda out: checkpoint(nn.BatchNorm1d(3).double(), out, use_reentrant=False).sum(),
        r"^batch_norm\(\) at .* inside a checkpoint: .* writes twice",
    ),
}


@ROOMS
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


@ROOMS
def test_weights_that_are_computed_in_a_checkpoint_get_their_gradients(room):
    model, (x, _) = weight_norm(nn.Linear(4, 4).double()), batch()

    def program(recorded):
        checkpoint(model, recorded(x), use_reentrant=False).square().mean().backward()

    assert_same_gradients(model, program, room)


class Remembers(nn.Linear):
    """Keeps its last output, as for a loss beside the model's own."""

    last = None

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.call, x, use_reentrant=False)
            self.last = x.detach()
        return x

    def call(self, x):
        return super().forward(x)


@ROOMS
def test_a_module_keeps_a_recorded_tensor_between_checkpoints(room):
    model, (x, _) = Remembers(4, 4).double(), batch()
    wanted = model(x)
    assert_same_gradients(
        model, lambda recorded: model(recorded(x)).square().mean().backward(), room
    )
    model(lazy(x))
    torch.testing.assert_close(model.last.value(), wanted.detach())


class Calls(nn.Linear):
    """Counts its calls in a buffer, in place or not."""

    def __init__(self, in_place):
        super().__init__(4, 4)
        self.in_place = in_place
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.n_calls += 1
        else:
            self.n_calls = self.n_calls + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: spectral_norm(nn.Linear(4, 4)), "_SpectralNorm._u"),
        (lambda: Calls(True), "Calls.n_calls"),
        (lambda: nn.Sequential(nn.Tanh(), Calls(False)), "Calls.n_calls"),
        (lambda: nn.BatchNorm1d(4), r"batch_norm\(\) at .*"),
    ],
    ids=["spectral norm", "counter", "new counter", "statistics"],
)
def test_buffers_that_are_written_in_a_checkpoint_are_refused_and_brought_back(make, name):
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    recorded = lazy(batch()[0])
    refused = f"^{name} writes .* inside a checkpoint"
    with pytest.raises(AdaptiveUsageError, match=refused):
        checkpoint(lambda x: model(x).tanh(), recorded, use_reentrant=False)
    with pytest.raises(AdaptiveUsageError, match=refused):
        checkpoint(lambda: model(recorded).tanh(), use_reentrant=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    # without gradients it runs once, and plain tensors are none of it
    with torch.no_grad():
        checkpoint(model, recorded, use_reentrant=False).value()
    checkpoint(model, batch()[0], use_reentrant=False)


def _with_a_parameter(x):
    a = lazy(x)
    return a.add_(nn.Parameter(torch.ones(4, dtype=torch.float64)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: lazy(x.requires_grad_()),
        _with_a_parameter,
        lambda x: (lazy(x) * 2).requires_grad_(),
    ],
)
def test_a_function_of_its_own_is_refused_wherever_gradients_begin(make):
    x, _ = batch()
    with pytest.raises(AdaptiveUsageError, match="came out of 'Twice'"):
        Twice.apply(make(x)).sum().backward()


def test_gradients_of_a_computed_tensor_and_requires_grad_of_a_recorded_one_are_refused():
    x, _ = batch()
    computed = (lazy(x) * 2).requires_grad_()
    computed.square().sum().backward()
    with pytest.raises(AdaptiveUsageError, match="computed of one of lazy"):
        _ = computed.grad
    with pytest.raises(AdaptiveUsageError, match="call it of the plain tensor, before lazy"):
        lazy(x).requires_grad_()
    model = mlp()
    model[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(AdaptiveUsageError, match="BackwardHookFunction"):
        model(lazy(x)).sum().backward()
    # gradients that are not wanted any more
    a = (lazy(x) * 1).requires_grad_().requires_grad_(False)
    assert torch.equal(Twice.apply(a).value(), x * 2)


@ROOMS
def test_the_batch_gets_its_gradient_and_passes_it_on(room):
    model, (x, _), before = mlp(), batch(), nn.Linear(4, 4).double()

    def program(wrap):
        before.zero_grad()
        leaf = x.clone().requires_grad_()
        recorded = wrap(leaf)
        model(recorded).square().sum().backward()
        model(wrap(before(x))).square().sum().backward()
        return leaf.grad, recorded.grad, before.weight.grad.clone()

    torch.testing.assert_close(*assert_same_gradients(model, program, room))


@ROOMS
def test_a_graph_runs_backward_once(room):
    model, (x, _) = mlp(), batch()
    with RoomFor(room or 8):
        out = model(lazy(x))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            out.square().sum().backward()
        # what was cut off is data
        mlp()(out.detach().repeat(1, 2)[:, :4]).sum().backward()


def test_nothing_to_train_is_refused_as_torch_does():
    x, _ = batch()
    with pytest.raises(RuntimeError, match="does not require grad"):
        lazy(x).sum().backward()
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        mlp()(lazy(x)).backward()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        mlp()(lazy(x)).backward(torch.ones(2))


@ROOMS
def test_autocast_holds_where_it_was_recorded(room):
    model, (x, y) = mlp().float(), batch()
    found = []
    for wrap in (lambda value: value, lazy):
        model.zero_grad()
        with RoomFor(room if room and wrap is lazy else 8):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(wrap(x.float()))
            assert out.dtype is torch.bfloat16
            F.cross_entropy(out.float(), y).backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_batches_of_two_sizes_that_meet_run_whole():
    model, (x, _) = mlp(), batch()

    def program(wrap):
        (model(wrap(x)).sum() + model(wrap(x[:5])).sum()).backward()

    assert_same_gradients(model, program)
    with RoomFor(3), pytest.raises(OutOfRetriesError, match="of 8 and of 5 samples"):
        program(lazy)


@ROOMS
def test_two_models_take_turns(room):
    """A generator and a discriminator: what one gives is detached for the other."""
    first, second, (x, _) = mlp(n_out=4), mlp(), batch()

    def program(wrap):
        first.zero_grad()
        fake = first(wrap(x))
        second(fake.detach()).square().mean().backward()
        second.zero_grad()
        second(fake).mean().backward()
        return [p.grad.clone() for p in first.parameters()]

    torch.testing.assert_close(*assert_same_gradients(second, program, room))
