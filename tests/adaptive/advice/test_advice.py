"""Whoever takes advice by hand gets the peak that it told, and reading it changes nothing."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tenure
from tenure.adaptive import plan, predict_peak, statistics
from tests.needs import needs_torch
from tests.true_peak import step_of, true_peak_bytes

IN_PARTS = needs_torch("2.13", "F.linear_cross_entropy")
# scalars that kernels make of numbers are seen or not
_SLACK = 256


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, n_words=600, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(n_words, 32)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(32, n_words)

    def hidden(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.head(self.hidden(x))


def words(n=16):
    return torch.randint(0, 600, (n, 32))


def loss_of(model):
    return lambda x: F.cross_entropy(model(x).view(-1, 600), x.view(-1))


def advice_on(part, report):
    return [each for each in report.advice if part in each.what]


def the_advice_on(part, report):
    (found,) = advice_on(part, report)
    assert found.saves_bytes == report.peak_bytes - found.peak_bytes
    return found


def true_peak_of(fn, batch, optimizer=None):
    base = predict_peak(fn, batch, optimizer=optimizer).baseline_bytes
    return base + true_peak_bytes(step_of(fn, batch, optimizer))


def run(line, **names):
    exec(line, {"torch": torch, "functools": functools, "tenure": tenure, **names})


# --- checkpoints


@pytest.mark.slow
def test_blocks_are_checkpointed_as_told():
    model, x = LanguageModel(), words()
    fn = loss_of(model)
    found = the_advice_on("checkpoint the 4 Block of model.layers", predict_peak(fn, x))
    assert found.saves_bytes > 0
    assert not found.changes_numbers
    run(found.how, model=model)
    assert isinstance(model.layers[0].forward, functools.partial)
    assert predict_peak(fn, x).peak_bytes == found.peak_bytes
    assert 0 <= found.peak_bytes - true_peak_of(fn, x) <= _SLACK


def test_layers_of_torch_alone_and_inference_get_no_checkpoints():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    report = predict_peak(lambda x: model(x).square().mean(), torch.randn(64, 8))
    assert not advice_on("checkpoint", report)
    model, x = LanguageModel(), words()
    with torch.no_grad():
        report = predict_peak(lambda x: model(x).mean(), x)
    assert not advice_on("checkpoint", report)


# --- micro-batches


def test_half_of_the_batch_takes_what_was_told():
    model, x = LanguageModel(), words()
    fn = loss_of(model)
    report = predict_peak(fn, x)
    found = the_advice_on("micro-batches of 8 of the 16", report)
    assert found.saves_bytes > 0
    by_hand = lambda x: tenure.adaptive.step(fn, x, maximum=8, verify=False)  # noqa: E731
    assert predict_peak(by_hand, x).peak_bytes == found.peak_bytes
    base = report.baseline_bytes
    real = base + true_peak_bytes(lambda: run(found.how, fn=fn, batch=x))
    # the first time that it splits, a step verifies it
    assert real >= found.peak_bytes - _SLACK


# --- logits


def in_parts(model):
    def fn(x):
        hidden = model.hidden(x)
        return F.linear_cross_entropy(
            hidden.view(-1, 32),
            model.head.weight,
            x.view(-1),
            linear_bias=model.head.bias,
            options=nn.LinearCrossEntropyOptions(),
        )

    return fn


@IN_PARTS
def test_logits_in_parts_take_what_was_told():
    model, x = LanguageModel(depth=1), words()
    report = predict_peak(loss_of(model), x)
    found = the_advice_on("logits of model.head", report)
    assert found.saves_bytes > report.peak_bytes // 4
    by_hand = predict_peak(in_parts(model), x).peak_bytes
    assert abs(by_hand - found.peak_bytes) <= _SLACK
    assert abs(found.peak_bytes - true_peak_of(in_parts(model), x)) <= _SLACK


@pytest.mark.parametrize(
    "loss",
    [
        # something else reads the logits
        lambda model, x: F.cross_entropy((y := model(x).view(-1, 600)), x.view(-1)) + y.mean(),
        # no cross entropy
        lambda model, x: model(x).square().mean(),
        # another order
        lambda model, x: F.cross_entropy(model(x).transpose(1, 2), x),
    ],
)
def test_other_uses_of_logits_get_no_advice(loss):
    model, x = LanguageModel(depth=1), words()
    assert not advice_on("logits", predict_peak(lambda x: loss(model, x), x))


# --- optimizers


def test_an_optimizer_that_steps_one_by_one_takes_what_was_told():
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), torch.randn(2, 128)
    fn = lambda x: model(x).square().mean()  # noqa: E731
    adam = torch.optim.Adam(model.parameters(), foreach=True)
    groups = copy.copy(adam.param_groups[0])
    report = predict_peak(fn, x, optimizer=adam)
    assert report.phase == "optimizer step"
    found = the_advice_on("let Adam step one parameter after the other", report)
    assert found.saves_bytes > 0
    assert adam.param_groups[0] == groups
    run(found.how, optimizer=adam)
    assert predict_peak(fn, x, optimizer=adam).peak_bytes == found.peak_bytes
    assert abs(found.peak_bytes - true_peak_of(fn, x, adam)) <= _SLACK


# --- autocast


def test_autocast_takes_what_was_told_and_says_that_numbers_change():
    model, x = LanguageModel(), words()
    fn = loss_of(model)
    found = the_advice_on("bfloat16", predict_peak(fn, x))
    assert found.changes_numbers

    def by_hand(x):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(x)

    assert predict_peak(by_hand, x).peak_bytes == found.peak_bytes
    assert not advice_on("bfloat16", predict_peak(by_hand, x))


# --- what holds for all


def test_reading_advice_changes_nothing():
    model, x = LanguageModel(), words()
    model.head.weight.grad = torch.ones(600, 32)
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(0))
    adam = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = len(model.layers[0]._forward_hooks)
    rng = torch.get_rng_state()
    group = copy.copy(adam.param_groups[0])
    report = predict_peak(loss_of(model), x, optimizer=adam)
    attempts = statistics().attempts
    assert report.advice
    assert statistics().attempts == attempts
    assert adam.state == {}
    assert adam.param_groups[0] == group
    assert torch.equal(model.head.weight.grad, torch.ones(600, 32))
    assert model.head.bias.grad is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert len(model.layers[0]._forward_hooks) == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.slow
def test_a_plan_advises_on_its_step():
    model, x = LanguageModel(), words()
    fn = loss_of(model)
    found = plan(fn, x, "1GiB", maximum=4)
    advised = the_advice_on("checkpoint", found)
    run(advised.how, model=model)
    assert plan(fn, x, "1GiB", maximum=4).peak_bytes == advised.peak_bytes
    assert not advice_on("micro-batches", found)
