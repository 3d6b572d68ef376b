"""Reading values: computed once, in whatever order, whole and in parts."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import NewDisposeScope
from tenure.adaptive import AdaptiveUsageError, LazyTensor, lazy

from ..step.step_cases import gradients, wanted_of
from .programs import RoomFor, assert_same, batch, mlp


def test_the_loss_that_was_read_is_the_one_whose_gradients_come_with_dropout():
    model, (x, _) = nn.Sequential(mlp(), nn.Dropout(0.5)).double(), batch()
    with RoomFor(3):
        for _ in range(3):
            model.zero_grad()
            out = model(lazy(x))
            loss = out.square().mean()
            # in a scope that ends
            with NewDisposeScope("reading"):
                value = loss.item()
            assert gradients(model) == {}
            after_reading = torch.get_rng_state()
            loss.backward()
            assert loss.item() == value
            assert out.value().square().mean().item() == pytest.approx(value)
            assert torch.equal(torch.get_rng_state(), after_reading)


def test_whole_random_numbers_are_those_of_the_plain_program():
    model, (x, _) = nn.Sequential(nn.Dropout(0.5), mlp(), nn.Dropout(0.5)).double(), batch()

    def program(wrap):
        torch.manual_seed(3)
        with NewDisposeScope("step"):
            loss = model(wrap(x)).square().mean()
            loss.item()
            loss.backward()
        return torch.rand(()).item()

    assert_same(model, program, rtol=0)


def test_a_program_runs_once_however_much_of_it_is_read(model, x, y):
    with RoomFor(8) as room:
        out = model(lazy(x))
        loss = F.cross_entropy(out, y)
        loss.item(), str(loss), out.tolist(), out.argmax(1).tolist()
        loss.backward()
        loss.item(), float(loss)
        assert room.rows == [8]
        # results that nobody has do not run
        a = lazy(x)
        abandoned = model(a)
        # nor do those that wait, for what is made of the batch alone
        assert (a > 0).any()
        assert room.rows == [8]
        model(a).sum().item()
        assert room.rows == [8, 8, 8]
        del abandoned
        model(a)
        model(a * 2).sum().item()
    assert room.rows == [8, 8, 8, 8]
    # a chain of sums that a recursive evaluation runs 2 ** 40 times
    value = lazy(torch.ones(2, dtype=torch.float64))
    for _ in range(40):
        value = value + value
    assert value.tolist() == [2.0**40] * 2


@pytest.mark.parametrize("room", [8, 3])
def test_a_loss_that_failed_does_not_fail_the_next_one_on_the_same_outputs(room, model, x, y):
    expected = wanted_of(model, F.cross_entropy(model(x), y))
    with RoomFor(room):
        out = model(lazy(x))
        failed = F.cross_entropy(out, y + 3)
        with pytest.raises(IndexError):
            failed.backward()
        F.cross_entropy(out, y).backward()
        torch.testing.assert_close(gradients(model), expected)
        with pytest.raises(IndexError):
            failed.item()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_split_and_put_together(mode):
    # of a size of its own, as what was tried of a call is known from then on
    model, (x, y) = mlp(), batch(13)
    expected = model(x)
    # its calls are tried on three samples before they are split for the first time
    for n_rows, n_ooms in ((13 + 12, 2), (13, 0)):
        with mode(), RoomFor(3) as room:
            out = model(lazy(x))
            right = (out.argmax(1) == y).sum()
            torch.testing.assert_close(out.cpu().value(), expected.detach())
            assert right.item() == (expected.argmax(1) == y).sum()
            assert max(room.rows) <= 3
            assert (sum(room.rows), room.n_ooms) == (n_rows, n_ooms)
            loss = F.cross_entropy(model(lazy(x)), y).item()
        assert loss == pytest.approx(F.cross_entropy(expected, y).item())


@pytest.mark.parametrize("mixed", [lambda y: y.flip(0), lambda y: y.cumsum(0)])
def test_whole_numbers_that_begin_alike_are_not_taken_to_be_kept_apart(mixed, model):
    x, y = batch(256)[0], (torch.arange(256) > 253).long()
    expected = mixed(y) + model(x).argmax(1)
    with torch.no_grad(), RoomFor(3):
        a, b = lazy(x, y)
        assert (mixed(b) + model(a).argmax(1)).value().equal(expected)


def test_numbers_that_a_call_is_tried_with_are_valid_where_only_one_is(model, x):
    table, types = nn.Embedding(1, 4).double(), torch.zeros(8, dtype=torch.long)
    assert_same(model, lambda wrap: model(wrap(x) + table(wrap(types))).sum().backward(), room=3)


def test_repr_computes_nothing_and_says_so(model, x):
    with RoomFor(0):
        out = model(lazy(x))
        loss = out.mean()
        assert repr(loss) == "lazy float64[] on cpu, not computed yet"
    assert isinstance(out, LazyTensor)
    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.dtype, out.device, out.ndim) == ((8, 3), torch.float64, x.device, 2)
    assert (out.requires_grad, out.is_leaf, out.grad_fn is None) == (True, False, False)
    assert (out.detach().requires_grad, out.numel(), out.size(1)) == (False, 24, 3)
    loss.item()
    assert repr(loss) == "lazy float64[] on cpu"
    assert str(loss) == str(loss.value())
    assert f"{loss:.3f}" == f"{loss.item():.3f}"


READS = {
    "float": lambda t: float(t.sum()),
    "bool": lambda t: bool(t.sum() > 0),
    "index": lambda t: [1, 2, 3, 4][t.sum().long().abs().clamp(max=3)],
    "numpy": lambda t: t.detach().cpu().numpy().tolist(),
    "asarray": lambda t: np.asarray(t.detach()).tolist(),
    "in": lambda t: 1e9 in t,
    "str": str,
    "nonzero": lambda t: (t > 0).nonzero().tolist(),
    "mask": lambda t: t[t > 0].tolist(),
    "if": lambda t: "yes" if (t > 0).any() else "no",
    "copy": lambda t: copy.deepcopy(t.detach()).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())).tolist(),
    "equal": lambda t: torch.equal(t, t),
    "len": len,
    "iter": lambda t: [row.tolist() for row in t],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_python_gets_values(read, x):
    assert read(lazy(x) * 1.5) == read(x * 1.5)


def test_a_parameter_that_was_frozen_as_it_was_recorded_is_refused_once_it_requires_grad():
    model = mlp()
    model[0].requires_grad_(False)
    loss = model(lazy(batch()[0])).sum()
    with torch.no_grad():
        value = model(lazy(batch()[0])).sum()
    model[0].requires_grad_(True)
    assert value.item() != 0
    told = "given other memory, or set to require grad: the r"
    with pytest.raises(AdaptiveUsageError, match=told):
        loss.backward()
    assert not gradients(model)
    model[0].requires_grad_(False)
    loss.backward()
    assert [*gradients(model)] == ["2.weight", "2.bias"]


def test_a_tensor_written_to_after_it_was_recorded_is_refused(model, x):
    out = model(lazy(x))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(AdaptiveUsageError, match="was written to after a call of torch"):
        out.sum().item()
    loss = model(lazy(x)).sum()
    x.zero_()
    with pytest.raises(AdaptiveUsageError, match="was written to after a call of torch"):
        loss.backward()
    loss = model(lazy(x)).sum()
    model[0].weight.data = torch.zeros_like(model[0].weight)
    with pytest.raises(AdaptiveUsageError, match=r"float64\[48, 4\].* was written to after"):
        loss.backward()
    assert gradients(model) == {}


def test_a_write_into_a_plain_tensor_is_seen_at_once(x):
    mean = torch.zeros(4, dtype=torch.float64)
    mean.mul_(0.9).add_(lazy(x).mean(0), alpha=0.1)
    torch.testing.assert_close(mean, 0.1 * x.mean(0))


def test_a_handle_that_is_gone_frees_the_batch(no_gc):
    model = mlp()
    for room in (8, 3):
        x, _ = batch()
        gone = weakref.ref(x)
        with RoomFor(room):
            loss = model(lazy(x)).sum()
            loss.item()
            loss.backward()
        del x, loss
        assert gone() is None


def test_a_question_about_shapes_keeps_no_tensor(x, no_gc):
    a, other = lazy(x), torch.ones_like(x)
    gone = weakref.ref(other)
    assert torch.is_same_size(a, other)
    del other
    assert gone() is None


def test_gradients_that_wait_are_used_when_there_is_more_memory_by_then():
    model, positions, (x, _) = mlp(), nn.Parameter(torch.randn(4, dtype=torch.float64)), batch()

    def loss_of(x):
        # computed beside the batch: a graph that runs backward once
        return model(x + positions.exp()).square().mean()

    both = nn.ModuleList([model, nn.ParameterList([positions])])
    wanted = wanted_of(both, loss_of(x))
    with RoomFor(3):
        loss = loss_of(lazy(x))
        assert loss.item() > 0
    assert not gradients(both)
    with RoomFor(8) as room:
        loss.backward()
    assert room.rows == []
    torch.testing.assert_close(gradients(both), wanted)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_call_that_draws_is_split_only_if_it_keeps_samples_apart(keeps, model, x):
    with torch.no_grad(), RoomFor(3):
        drawn = F.gumbel_softmax(model(lazy(x)), dim=1 if keeps else 0).value()
    torch.testing.assert_close(drawn.sum(1 if keeps else 0), torch.ones(8 if keeps else 3).double())


def test_values_that_were_read_stay_and_train_where_two_batches_meet_and_start_over():
    first, second, (x, _) = mlp(), nn.Linear(4, 3).double(), batch()
    model = nn.ModuleList([first, second, mlp(n_in=3)])

    def program(wrap):
        one, other = wrap(x), wrap(x.flip(0))
        noise = torch.empty_like(second(one)).uniform_()
        outs = [second(one) * noise, second(other)]
        before = [out.tolist() for out in outs]
        model[2](outs[1] * outs[0]).square().mean().backward()
        assert [out.tolist() for out in outs] == before
        return before

    assert_same(model, program, room=3)


# --- what is written in place: once, and behind the recording's back (see also test_programs)


def test_a_write_is_done_once_where_a_second_loss_starts_over(model, x):
    a = x * 3
    wanted = wanted_of(model, model(a).square().mean() + model(a).abs().mean() + model(a).mean())
    recorded = lazy(x.clone())
    recorded.mul_(3)
    first, second = model(recorded).square().mean(), model(recorded).abs().mean()
    first.backward()
    with RoomFor(3):
        (second + model(recorded).mean()).backward()
    assert recorded.sum().item() == pytest.approx(a.sum().item(), rel=1e-12)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-11, atol=1e-13)


def _elsewhere(a):
    view = a[:, 1]
    view.mul_(2)
    a[:, 2] = view


def _another_view(a):
    view, _ = a[:, 1], a[:, 0].mul_(3)
    view.mul_(2)


def _a_view_of_before(a):
    view = a[:, :2]
    a[:, 0] *= 2
    view.sum()


@pytest.mark.parametrize("write", [_elsewhere, _another_view, _a_view_of_before])
def test_other_writes_through_a_view_of_a_recorded_tensor_are_refused(write, x):
    with pytest.raises(AdaptiveUsageError, match=r"Write by index, as in x\[:, 0\] \+= 1"):
        write(lazy(x) * 1)


USES = {
    "value": lambda t: t.value(),
    "call": lambda t: t + 1,
    "backward": lambda t: t.sum().backward(),
    "write": lambda t: t.mul_(2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("of_view", [True, False])
def test_a_tensor_is_refused_after_a_write_into_another_one_in_its_memory(use, of_view):
    (x, _), text = batch(), "was used, and another one in the same memory was written"
    before = x.clone()
    for was_read in (True, False):
        a = lazy(x.clone().requires_grad_()) * 1
        view = a[:, :2]
        if was_read:
            assert view.sum().item() == x[:, :2].sum().item()
        written, other = (view, a) if of_view else (a, view)
        written.mul_(2)
        with pytest.raises(AdaptiveUsageError, match=text):
            use(other)
        torch.testing.assert_close(written.value(), (x[:, :2] if of_view else x) * 2)
    assert torch.equal(x, before)
