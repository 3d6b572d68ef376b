"""Ways to run backward, and where the gradients go."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, lazy
from tests.needs import needs_torch

from ..unchanged import unchanged
from .programs import ROOMS, WIDE, RoomFor, Twice, Vision, assert_same, batch, gradients, mlp

SEED = torch.ones(8, 3, dtype=torch.float64)


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
def test_what_wants_the_graph_of_the_whole_is_refused_by_name(program, text, room, model, x):
    with RoomFor(room or 8):
        out = model(lazy(x))
        with pytest.raises(AdaptiveUsageError, match=text):
            program(out)
        assert gradients(model) == {}
        # and nothing was recorded of it
        out.sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()


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
    recorded = lazy(batch()[0])
    refused = f"^{name} writes .* inside a checkpoint"
    for work in (
        lambda: checkpoint(lambda x: model(x).tanh(), recorded, use_reentrant=False),
        lambda: checkpoint(lambda: model(recorded).tanh(), use_reentrant=False),
    ):
        with unchanged(model), pytest.raises(AdaptiveUsageError, match=refused):
            work()
    # without gradients it runs once, and plain tensors are none of it
    with torch.no_grad():
        checkpoint(model, recorded, use_reentrant=False).value()
    checkpoint(model, batch()[0], use_reentrant=False)


def _with_a_parameter(x):
    return lazy(x).add_(nn.Parameter(torch.ones(4, dtype=torch.float64)))


def _with_a_hook(x):
    model = mlp()
    model[2].register_full_backward_hook(lambda *_: None)
    return model(lazy(x))


def _run_backward(x):
    computed = (lazy(x) * 2).requires_grad_()
    computed.square().sum().backward()
    return computed


OWN = "came out of 'Twice'"
# wherever gradients begin
REFUSED_OF_BATCH = [
    (lambda x: Twice.apply(lazy(x.requires_grad_())).sum().backward(), AdaptiveUsageError, OWN),
    (lambda x: Twice.apply(_with_a_parameter(x)).sum().backward(), AdaptiveUsageError, OWN),
    (lambda x: Twice.apply((lazy(x) * 2).requires_grad_()).sum(), AdaptiveUsageError, OWN),
    (lambda x: _with_a_hook(x).sum().backward(), AdaptiveUsageError, "BackwardHookFunction"),
    (lambda x: _run_backward(x).grad, AdaptiveUsageError, "computed of one of lazy"),
    (
        lambda x: lazy(x).requires_grad_(),
        AdaptiveUsageError,
        "call it of the plain tensor, before lazy",
    ),
    (lambda x: lazy(x).sum().backward(), RuntimeError, "does not require grad"),
    (lambda x: mlp()(lazy(x)).backward(), RuntimeError, "only for scalar outputs"),
    (lambda x: mlp()(lazy(x)).backward(torch.ones(2)), RuntimeError, "Mismatch in shape"),
]


@pytest.mark.parametrize(("use", "kind", "text"), REFUSED_OF_BATCH)
def test_gradients_that_begin_or_end_elsewhere_are_refused(use, kind, text):
    with pytest.raises(kind, match=text):
        use(batch()[0])


def test_a_function_of_its_own_runs_where_gradients_are_not_wanted_any_more(x):
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

    assert_same(model, program, room)


@ROOMS
def test_a_graph_runs_backward_once(room, model, x):
    with RoomFor(room or 8):
        out = model(lazy(x))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            out.square().sum().backward()
        # what was cut off is data
        mlp()(out.detach().repeat(1, 2)[:, :4]).sum().backward()


@ROOMS
@pytest.mark.parametrize("caches", [True, False])
def test_autocast_holds_where_it_was_recorded(room, caches):
    layer = nn.Linear(4, 4)
    # gradients of a layer's uses are added in half precision if one cast serves all
    model, (x, y) = nn.Sequential(*[layer] * 4, nn.Linear(4, 3)), batch()
    found = []
    for wrap in (lambda value: value, lazy):
        model.zero_grad()
        with RoomFor(room if room and wrap is lazy else 8):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
                out = model(wrap(x.float()))
            assert out.dtype is torch.bfloat16
            F.cross_entropy(out.float(), y).backward()
        found.append(gradients(model))
    rounding = 2e-2 if room else 0
    torch.testing.assert_close(*found, rtol=rounding, atol=rounding)


def test_batches_of_two_sizes_that_meet_run_whole(model, x):

    def program(wrap):
        (model(wrap(x)).sum() + model(wrap(x[:5])).sum()).backward()

    assert_same(model, program)
    with RoomFor(3), pytest.raises(OutOfRetriesError, match="of 8 and of 5 samples"):
        program(lazy)


# --- tensors with a graph of their own, computed beside the batch or from it


def _piled(model, x, y):
    """Pile up what a model gives in a tensor that is plain, as mixtures of experts do."""
    _, positions, scale = model.beside()
    hidden = model.inner(x * positions[0])
    piled = torch.zeros(8, 4, dtype=torch.float64)
    for chosen in (y == 0, y != 0):
        piled.index_add_(0, chosen.nonzero()[:, 0], hidden[chosen] * scale)
    (piled + hidden).square().mean().backward()


def test_what_is_piled_up_in_a_plain_tensor_gets_its_gradients_or_is_refused():
    model, (x, y) = Vision(), batch()
    assert_same(model, lambda wrap: _piled(model, *wrap(x, y)))
    with RoomFor(3), pytest.raises(AdaptiveUsageError, match=r"index_add_\(\) writes what has a"):
        _piled(model, *lazy(x, y))
    assert gradients(model) == {}


class RoomBackward(RoomFor):
    """A backward pass through more rows than so many runs out of memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backward = func is torch.ops.aten.mm.default and args[0].shape[-1] == WIDE
        if backward and not isinstance(args[0], FakeTensor) and args[0].shape[0] > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def test_a_retry_runs_such_a_graph_once():
    model, (x, _) = mlp(n_out=4), batch()
    scale = nn.Parameter(torch.randn(4, dtype=torch.float64))
    seen = []

    def program(wrap):
        scale.grad = None
        out = model(wrap(x.clone().requires_grad_()))
        # it has run, so that the graph of the scale runs backward before memory runs out
        assert out.sum().item() != 0
        factor = scale.exp()
        factor.register_hook(lambda gradient: seen.append(gradient.clone()))
        (out * factor).square().mean().backward()
        return scale.grad.clone()

    expected = program(lambda x: x)
    wanted = gradients(model)
    model.zero_grad()
    with RoomBackward(3):
        found = program(lazy)
    torch.testing.assert_close([found, gradients(model)], [expected, wanted])
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


class _Fails(torch.autograd.Function):
    error = ValueError

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise _Fails.error("out of memory")


@ROOMS
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_where_such_a_graph_fails_no_gradient_is_delivered(room, kind, monkeypatch):
    model, (x, _) = Vision(), batch()
    monkeypatch.setattr(_Fails, "error", kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = AdaptiveUsageError if kind is torch.OutOfMemoryError else kind
    with unchanged(model), RoomFor(3 * (room or 8)), pytest.raises(expected, match="emory"):
        (model(lazy(x)) * _Fails.apply(model.scale.exp())).square().mean().backward()


@ROOMS
def test_hooks_see_whole_gradients_once(room):
    model, (x, _) = Vision(), batch()
    seen = []

    def program(wrap):
        token, positions, scale = model.beside()
        # the scale is reached by itself too
        handles = [
            each.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
            for each in (token, positions, scale, model.scale, model.token)
        ]
        (model(wrap(x), (token, positions, scale)) * model.scale).square().mean().backward()
        for handle in handles:
            handle.remove()

    assert_same(model, program, room and 3 * room)
    assert len(seen) == 10
    for found in seen[5:]:
        assert any(found.shape == each.shape and torch.allclose(found, each) for each in seen[:5])
