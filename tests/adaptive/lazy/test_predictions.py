"""The first backward pass of a program begins with the size that is predicted to fit."""

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import lazy, memory_budget
from tenure.adaptive._step import _at_size

from .programs import assert_same_gradients

predicted = functools.partial(lazy, predict=True)
pytestmark = pytest.mark.usefixtures("forgetful")


def _mlp():
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    return nn.Sequential(*layers), torch.randn(512, 32), torch.randint(0, 8, (512,))


def _cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip
    return model, torch.randn(64, 3, 16, 16), torch.randint(0, 8, (64,))


def _transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    return model, torch.randn(64, 12, 16), torch.randint(0, 12, (64, 16))


@pytest.fixture
def predictions(monkeypatch):
    """The sizes that are predicted."""
    asked, plain = [], _at_size.Forecast

    class Counted(plain):
        def __call__(self, size):
            asked.append(size)
            return super().__call__(size)

    monkeypatch.setattr(_at_size, "Forecast", Counted)
    return asked


def _needed_bytes(program):
    with memory_budget("8GiB") as budget:
        program(lambda *values: values)
    return budget.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_mlp, _cnn, _transformer])
def test_the_first_attempt_fits_and_fills_the_memory(kind, steps):
    torch.manual_seed(0)
    model, x, y = kind()
    model, x = model.double(), x.double()

    def program(wrap):
        a, b = wrap(x, y)
        F.cross_entropy(model(a), b).backward()

    limit = _needed_bytes(program) // 3

    def within(wrap):
        with memory_budget(limit if wrap is lazy else "8GiB") as budget:
            program(predicted if wrap is lazy else lambda *values: values)
        return budget.peak_bytes

    _, peak_bytes = assert_same_gradients(model, within)
    ((size, attempts),) = steps
    assert attempts == 1
    assert size < len(x)
    # and with a tenth more it would not fit
    assert peak_bytes * (1 + 1 / 9) > limit


@pytest.mark.slow
def test_a_program_is_predicted_once(steps, predictions):
    model, x, y = _mlp()

    def program(wrap):
        a, b = wrap(x, y)
        F.cross_entropy(model(a), b).backward()

    limit = _needed_bytes(program) // 3
    n_asked = []
    for _ in range(3):
        with memory_budget(limit):
            program(predicted)
        n_asked.append(len(predictions))
    assert n_asked == n_asked[:1] * 3
    assert n_asked[0] > 1
    assert [attempts for _, attempts in steps] == [1, 1, 1]


def test_what_is_predicted_to_fit_runs_whole_from_then_on(steps, predictions):
    model, x, y = _mlp()
    with memory_budget("8GiB"):
        for _ in range(3):
            F.cross_entropy(model(predicted(x)), y).backward()
        assert predictions == [512, 256]
        # a larger batch is not known to fit
        F.cross_entropy(model(predicted(x.repeat(2, 1))), y.repeat(2)).backward()
    assert steps == [(512, 1), (1024, 1)]


def test_a_loss_that_is_read_is_predicted_too(steps):
    model, x, y = _mlp()
    expected = F.cross_entropy(model(x), y).item()
    limit = _needed_bytes(lambda _: F.cross_entropy(model(x), y).backward()) // 3
    model.zero_grad()
    with memory_budget(limit):
        loss = F.cross_entropy(model(predicted(x)), y)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        loss.backward()
    assert [attempts for _, attempts in steps] == [1]


def test_nothing_is_predicted_where_memory_is_not_measured(steps, predictions):
    model, x, y = _mlp()
    F.cross_entropy(model(predicted(x)), y).backward()
    assert (steps, predictions) == ([], [])


def test_what_can_not_be_split_is_not_predicted(steps, predictions):
    model, x, y = _mlp()
    model = nn.Sequential(nn.BatchNorm1d(32), model)
    with memory_budget("8GiB"):
        for _ in range(2):
            F.cross_entropy(model(predicted(x)), y).backward()
    assert (steps, predictions) == ([], [])


def test_nothing_is_predicted_unless_it_is_asked_for(steps, predictions):
    model, x, y = _mlp()
    limit = _needed_bytes(lambda _: F.cross_entropy(model(x), y).backward()) // 3
    model.zero_grad()
    # what another thread would see at any operation of the program
    seen = set()
    model.register_forward_pre_hook(
        lambda *_: _on_another_thread(lambda: seen.update(map(type, model.parameters())))
    )
    with memory_budget(limit):
        F.cross_entropy(model(lazy(x)), y).backward()
    assert predictions == []
    assert seen == {nn.Parameter}
    assert steps[0][1] > 1


def _on_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
