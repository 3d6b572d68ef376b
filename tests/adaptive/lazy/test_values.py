"""Reading values: computed once, in whatever order, whole and in parts."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import NewDisposeScope
from tenure.adaptive import AdaptiveUsageError, LazyTensor, lazy, memory_budget

from .programs import RoomFor, assert_same_gradients, batch, gradients, mlp

pytestmark = pytest.mark.usefixtures("forgetful")


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("order", ["alb", "lab", "abl", "bal", "lba", "bla", "oab", "bo", "llb"])
def test_accuracy_loss_and_backward_in_any_order(order, room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        a, b = wrap(x, y)
        out = model(a)
        loss = F.cross_entropy(out, b)
        read = {
            "a": lambda: (out.argmax(1) == b).sum().item(),
            "l": loss.item,
            "b": loss.backward,
            "o": lambda: round(out.sum().item(), 9),
        }
        return {each: read[each]() or 0 for each in order}

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_loss_that_was_read_is_the_one_whose_gradients_come_with_dropout():
    model, (x, _) = nn.Sequential(mlp(), nn.Dropout(0.5)).double(), batch()
    with RoomFor(3):
        for _ in range(3):
            model.zero_grad()
            loss = model(lazy(x)).square().mean()
            value = loss.item()
            after_reading = torch.get_rng_state()
            loss.backward()
            # the bias of the last layer tells: its gradient is made of the numbers in the loss
            assert loss.item() == value
            assert torch.equal(torch.get_rng_state(), after_reading)


def test_whole_random_numbers_are_those_of_the_plain_program():
    model, (x, _) = nn.Sequential(nn.Dropout(0.5), mlp(), nn.Dropout(0.5)).double(), batch()

    def program(wrap):
        torch.manual_seed(3)
        out = model(wrap(x))
        loss = out.square().mean()
        loss.item()
        loss.backward()
        return torch.rand(()).item()

    expected, found = assert_same_gradients(model, program)
    assert expected == found


def test_shared_parts_run_once():
    """A chain of sums that a recursive evaluation runs 2 ** 40 times."""
    value = lazy(torch.ones(2, dtype=torch.float64))
    for _ in range(40):
        value = value + value
    assert value.tolist() == [2.0**40] * 2


def test_a_program_runs_once_however_much_of_it_is_read():
    model, (x, y) = mlp(), batch()
    with RoomFor(8) as room:
        out = model(lazy(x))
        loss = F.cross_entropy(out, y)
        loss.item(), str(loss), out.tolist(), out.argmax(1).tolist()
        loss.backward()
        loss.item(), float(loss)
    assert room.rows == [8]


def test_calls_whose_results_nobody_has_do_not_run():
    model, (x, _) = mlp(), batch()
    with RoomFor(8) as room:
        a = lazy(x)
        abandoned = model(a)
        model(a).sum().backward()
        assert room.rows == [8, 8]
        del abandoned
        model(a)
        assert model(a * 2).sum().item() != 0
    assert room.rows == [8, 8, 8]


@pytest.mark.parametrize("room", [8, 3])
def test_a_loss_that_failed_does_not_fail_the_next_one_on_the_same_outputs(room):
    model, (x, y) = mlp(), batch()
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
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
    for n_rows in (13 + 12, 13):
        with mode(), RoomFor(3) as room:
            out = model(lazy(x))
            moved = out.cpu()
            right = (out.argmax(1) == y).sum()
            torch.testing.assert_close(moved.value(), expected.detach())
            assert right.item() == (expected.argmax(1) == y).sum()
            assert max(room.rows) <= 3
            assert sum(room.rows) == n_rows
            loss = F.cross_entropy(model(lazy(x)), y).item()
        assert loss == pytest.approx(F.cross_entropy(expected, y).item())


@pytest.mark.parametrize("mixed", [lambda y: y.flip(0), lambda y: y.cumsum(0)])
def test_whole_numbers_that_begin_alike_are_not_taken_to_be_kept_apart(mixed):
    model, (x, _) = mlp(), batch()
    y = torch.tensor([0, 0, 0, 0, 0, 1, 2, 1])
    expected = mixed(y) + model(x).argmax(1)
    with torch.no_grad(), RoomFor(3):
        a, b = lazy(x, y)
        assert (mixed(b) + model(a).argmax(1)).value().equal(expected)


def test_inference_fits_a_budget():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 4)), torch.randn(512, 64)
    expected = model(x).detach()
    with torch.no_grad(), memory_budget("1MiB"):
        torch.testing.assert_close(model(lazy(x)).value(), expected)


def test_a_large_result_is_made_in_memory_of_its_own_size():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 2048).double().requires_grad_(False), torch.randn(128, 8).double()
    expected = model(x).sin() + 1
    # of samples in the second dimension as well
    for program in (lambda x: model(x).sin() + 1, lambda x: (model(x).sin() + 1).T):
        with torch.no_grad(), memory_budget(int(1.3 * expected.nbytes)):
            found = program(lazy(x)).value()
        torch.testing.assert_close(found if found.shape[0] == 128 else found.T, expected)


def test_training_fits_a_budget_and_remembers_how():
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(512, 64).double(), torch.randint(0, 8, (512,))

    def program(wrap):
        with memory_budget("6MiB") if wrap is lazy else torch.enable_grad():
            F.cross_entropy(model(wrap(x)), y).backward()

    for _ in range(3):
        assert_same_gradients(model, program)


def test_repr_computes_nothing_and_says_so():
    model, (x, _) = mlp(), batch()
    with RoomFor(0):
        loss = model(lazy(x)).mean()
        assert repr(loss) == "lazy float64[] on cpu, not computed yet"
    loss.item()
    assert repr(loss) == "lazy float64[] on cpu"
    assert str(loss) == str(loss.value())
    assert f"{loss:.3f}" == f"{loss.item():.3f}"


READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.sum() > 0),
    "index": lambda t: [1, 2, 3, 4][t.sum().long().abs().clamp(max=3)],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy().tolist(),
    "cpu numpy": lambda t: t.detach().cpu().numpy().tolist(),
    "asarray": lambda t: np.asarray(t.detach()).tolist(),
    "in": lambda t: 1e9 in t,
    "str": str,
    "nonzero": lambda t: (t > 0).nonzero().tolist(),
    "mask": lambda t: t[t > 0].tolist(),
    "unique": lambda t: t.round().unique().tolist(),
    "if": lambda t: "yes" if (t > 0).any() else "no",
    "copy": lambda t: copy.deepcopy(t.detach()).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())).tolist(),
    "save": lambda t: torch.save(t.detach(), io.BytesIO()),
    "equal": lambda t: torch.equal(t, t),
    "len": len,
    "iter": lambda t: [row.tolist() for row in t],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_python_gets_values(read):
    x, _ = batch()
    assert read(lazy(x) * 1.5) == read(x * 1.5)


def test_what_is_written_into_a_recorded_tensor_does_not_reach_the_users():
    x, _ = batch()
    before = x.clone()
    a = lazy(x)
    a.mul_(2)
    a[0] = 0.0
    expected = before * 2
    expected[0] = 0.0
    torch.testing.assert_close(a.value(), expected)
    assert torch.equal(x, before)


def test_a_tensor_written_to_after_it_was_recorded_is_refused():
    model, (x, _) = mlp(), batch()
    out = model(lazy(x))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(AdaptiveUsageError, match="was written to after a call of torch"):
        out.sum().item()
    out = model(lazy(x))
    x.zero_()
    with pytest.raises(AdaptiveUsageError, match="was written to after a call of torch"):
        out.sum().backward()


def test_a_write_into_a_plain_tensor_is_seen_at_once():
    x, _ = batch()
    mean = torch.zeros(4, dtype=torch.float64)
    mean.mul_(0.9).add_(lazy(x).mean(0), alpha=0.1)
    torch.testing.assert_close(mean, 0.1 * x.mean(0))


def test_gradients_that_nobody_asked_for_never_arrive():
    model, (x, _) = mlp(), batch()
    with RoomFor(3):
        model(lazy(x)).sum().backward()
        model.zero_grad()
        loss = model(lazy(x)).sum()
        loss.item()
        assert gradients(model) == {}
        loss.backward()
    assert gradients(model)


def test_inside_of_a_scope():
    model, (x, _) = mlp(), batch()

    def program(wrap):
        with NewDisposeScope("step"):
            loss = model(wrap(x)).square().mean()
            loss.backward()
            return loss.item()

    for room in (None, 3):
        expected, found = assert_same_gradients(model, program, room)
        assert expected == pytest.approx(found)


def test_computed_in_a_scope_that_ends():
    model, (x, _) = mlp(), batch()
    for room in (8, 3):
        with RoomFor(room):
            out = model(lazy(x))
            loss = out.square().mean()
            with NewDisposeScope("reading"):
                value = loss.item()
                loss.backward()
        assert loss.item() == value
        assert out.value().shape == (8, 3)


def test_a_handle_that_is_gone_frees_the_batch():
    import gc
    import weakref

    model = mlp()
    gc.disable()
    try:
        for room in (8, 3):
            x, _ = batch()
            gone = weakref.ref(x)
            with RoomFor(room):
                loss = model(lazy(x)).sum()
                loss.item()
                loss.backward()
            del x, loss
            assert gone() is None
    finally:
        gc.enable()


def test_recorded_tensors_are_tensors():
    x, _ = batch()
    out = mlp()(lazy(x))
    assert isinstance(out, torch.Tensor)
    assert isinstance(out, LazyTensor)
    assert (out.shape, out.dtype, out.device, out.ndim) == ((8, 3), torch.float64, x.device, 2)
    assert (out.requires_grad, out.is_leaf, out.grad_fn is None) == (True, False, False)
    assert (out.detach().requires_grad, out.numel(), out.size(1)) == (False, 24, 3)
    assert out.is_contiguous()
    assert out.grad is None


def test_outputs_are_there_after_a_loss_of_all_of_them():
    model, (x, y) = mlp(), batch()

    def program(wrap):
        out = model(wrap(x))
        F.cross_entropy(out @ out.T, torch.arange(8)).backward()
        return out.detach().sum().item() + (out.argmax(1) == y).sum().item()

    expected, found = assert_same_gradients(model, program, room=3)
    assert found == pytest.approx(expected)


def test_gradients_that_wait_are_used_when_there_is_more_memory_by_then():
    model, positions, (x, _) = mlp(), nn.Parameter(torch.randn(4, dtype=torch.float64)), batch(400)

    def loss_of(x):
        # computed beside the batch: a graph that runs backward once
        return model(x + positions.exp()).square().mean()

    with memory_budget("8GiB") as budget:
        loss_of(x).backward()
    wanted = [gradients(model), positions.grad]
    for limit in (budget.peak_bytes // 3, budget.peak_bytes * 4):
        model.zero_grad()
        positions.grad = None
        with memory_budget(limit):
            loss = loss_of(lazy(x))
            assert loss.item() > 0
            loss.backward()
        torch.testing.assert_close([gradients(model), positions.grad], wanted)


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: (out @ out.T).logsumexp(1).mean()])
def test_numbers_of_a_generator_of_the_users_are_drawn_once(room, loss):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        generator = torch.Generator().manual_seed(5)
        out = model(wrap(x))
        # draws one after the other, so that parts draw what the whole does
        noise = torch.empty_like(out).uniform_(generator=generator)
        loss(out * noise).backward()
        return generator.get_state()

    expected, found = assert_same_gradients(model, program, room)
    assert torch.equal(found, expected)


def test_numbers_of_a_generator_are_drawn_once_without_gradients():
    model, (x, _) = mlp(), batch()
    found = []
    for wrap in (lambda value: value, lazy):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad(), RoomFor(3 if wrap is lazy else 8):
            out = model(wrap(x))
            numbers = (out * torch.empty_like(out).uniform_(generator=generator)).tolist()
            found.append((torch.tensor(numbers), generator.get_state()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_call_that_draws_is_split_only_if_it_keeps_samples_apart(keeps):
    model, (x, _) = mlp(), batch()
    with torch.no_grad(), RoomFor(3):
        drawn = F.gumbel_softmax(model(lazy(x)), dim=1 if keeps else 0).value()
    torch.testing.assert_close(drawn.sum(1 if keeps else 0), torch.ones(8 if keeps else 3).double())


def test_what_makes_the_number_of_samples_a_number_is_not_split():
    model, (x, _) = mlp(), batch()

    def program(wrap):
        powers = torch.linalg.vander(model(wrap(x))[:, 0])
        assert powers.shape == (8, 8)
        return powers.square().mean().backward()

    assert_same_gradients(model, program, room=3)


def test_values_that_were_read_in_parts_have_gradients_where_two_batches_meet():
    model, second, (x, _) = mlp(), nn.Linear(4, 3).double(), batch()

    def program(wrap):
        first, other = wrap(x), wrap(x.flip(0))
        out = model(first)
        assert len(out.tolist()) == 8
        (second(other) * out).square().mean().backward()

    assert_same_gradients(model, program, room=3)


def test_random_numbers_that_were_read_stay_where_two_batches_meet_and_start_over():
    first, second, (x, _) = mlp(), nn.Linear(4, 3).double(), batch()
    model = nn.ModuleList([first, second, mlp(n_in=3)])

    def program(wrap):
        one, other = wrap(x), wrap(x.flip(0))
        noise = torch.empty_like(second(one)).uniform_()
        outs = [second(one) * noise, second(other)]
        before = [out.tolist() for out in outs]
        model[2](outs[1] * outs[0]).square().mean().backward()
        return before, [out.tolist() for out in outs]

    (before, _), found = assert_same_gradients(model, program, room=3)
    assert found == (before, before)
