"""Whoever takes advice by hand gets the peak that it told, and reading it changes nothing."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tenure
from tenure.adaptive import plan, predict_peak, statistics
from tenure.paging import page
from tests.needs import needs_torch
from tests.true_peak import step_of, true_peak_bytes

from ..unchanged import unchanged

# scalars that kernels make of numbers are seen or not
_SLACK = 256


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(600, 32)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(32, 600)

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
    assert found.saves_bytes == report.peak_bytes - found.peak_bytes > 0
    return found


def true_peak_of(fn, batch, optimizer=None):
    base = predict_peak(fn, batch, optimizer=optimizer).baseline_bytes
    return base + true_peak_bytes(step_of(fn, batch, optimizer))


def run(line, **names):
    exec(line, {"torch": torch, "functools": functools, "tenure": tenure, **names})


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


@pytest.fixture(scope="module")
def report():
    return predict_peak(loss_of(LanguageModel()), words())


def test_blocks_are_checkpointed_as_told(report):
    model, x = LanguageModel(), words()
    fn = loss_of(model)
    found = the_advice_on("checkpoint the 4 Block of model.layers", report)
    assert not found.changes_numbers
    run(found.how, model=model)
    assert isinstance(model.layers[0].forward, functools.partial)
    assert predict_peak(fn, x).peak_bytes == found.peak_bytes
    assert 0 <= found.peak_bytes - true_peak_of(fn, x) <= _SLACK


def test_autocast_and_half_of_the_batch_take_what_was_told(report):
    fn, x = loss_of(LanguageModel()), words()
    found = the_advice_on("bfloat16", report)
    assert found.changes_numbers

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(x)

    predicted = predict_peak(cast, x)
    assert predicted.peak_bytes == found.peak_bytes
    assert not advice_on("bfloat16", predicted)
    found = the_advice_on("micro-batches of 8 of the 16", report)
    split = lambda x: tenure.adaptive.step(fn, x, maximum=8, verify=False)  # noqa: E731
    assert predict_peak(split, x).peak_bytes == found.peak_bytes
    real = report.baseline_bytes + true_peak_bytes(lambda: run(found.how, fn=fn, batch=x))
    # the first time that it splits, a step verifies it
    assert real >= found.peak_bytes - _SLACK


@needs_torch("2.13", "F.linear_cross_entropy")
def test_logits_in_parts_take_what_was_told():
    model, x = LanguageModel(depth=1), words()
    report = predict_peak(loss_of(model), x)
    found = the_advice_on("logits of model.head", report)
    assert found.saves_bytes > report.peak_bytes // 4
    by_hand = predict_peak(in_parts(model), x).peak_bytes
    assert abs(by_hand - found.peak_bytes) <= _SLACK
    assert abs(found.peak_bytes - true_peak_of(in_parts(model), x)) <= _SLACK
    # without a backward pass, too
    with torch.no_grad():
        found = the_advice_on("logits of model.head", predict_peak(loss_of(model), x))
        assert found.peak_bytes == predict_peak(in_parts(model), x).peak_bytes


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
    model, x = LanguageModel(depth=0), words()
    report = predict_peak(lambda x: loss(model, x), x)
    assert not advice_on("logits", report)


def test_layers_of_torch_alone_and_inference_get_no_checkpoints():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    report = predict_peak(lambda x: net(x).square().mean(), torch.randn(64, 8))
    assert not advice_on("checkpoint", report)
    model, x = LanguageModel(), words()
    with torch.no_grad():
        assert not advice_on("checkpoint", predict_peak(lambda x: model(x).mean(), x))


def test_an_optimizer_that_steps_one_by_one_takes_what_was_told():
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), torch.randn(2, 128)
    fn = lambda x: model(x).square().mean()  # noqa: E731
    adam = torch.optim.Adam(model.parameters(), foreach=True)
    groups = copy.copy(adam.param_groups[0])
    report = predict_peak(fn, x, optimizer=adam)
    assert report.phase == "optimizer step"
    found = the_advice_on("let Adam step one parameter after the other", report)
    assert adam.param_groups[0] == groups
    run(found.how, optimizer=adam)
    assert predict_peak(fn, x, optimizer=adam).peak_bytes == found.peak_bytes
    assert abs(found.peak_bytes - true_peak_of(fn, x, adam)) <= _SLACK


def test_reading_advice_changes_nothing():
    model, x = LanguageModel(depth=2), words()
    model.head.weight.grad = torch.ones(600, 32)
    model.layers[0].register_forward_hook(lambda *_: None)
    adam = torch.optim.Adam(model.parameters())
    group, attempts = copy.copy(adam.param_groups[0]), statistics().attempts
    with unchanged(model):
        assert predict_peak(loss_of(model), x, optimizer=adam).advice
    assert statistics().attempts == attempts
    assert adam.state == {}
    assert adam.param_groups[0] == group


def test_a_plan_advises_on_its_step():
    model, x = LanguageModel(depth=2), words(4)
    fn = loss_of(model)
    found = plan(fn, x, "1GiB", maximum=2)
    advised = the_advice_on("checkpoint", found)
    run(advised.how, model=model)
    assert plan(fn, x, "1GiB", maximum=2).peak_bytes == advised.peak_bytes
    assert not advice_on("micro-batches", found)


# --- on an accelerator


def test_paging_is_named_beside_activations_on_the_host_and_trains(sim):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("sim")
    x = torch.ones(512, 64, device="sim")
    fn = lambda x: model(x).square().mean()  # noqa: E731
    found = the_advice_on("on the host", predict_peak(fn, x))

    def by_hand(x):
        with torch.autograd.graph.save_on_cpu():
            return fn(x)

    assert predict_peak(by_hand, x).peak_bytes == found.peak_bytes
    # the same of a device that is not here, for which the CPU stands
    model.cpu()
    same = the_advice_on("on the host", predict_peak(fn, x.cpu(), device="cuda"))
    assert (same.saves_bytes, same.peak_bytes) == (found.saves_bytes, found.peak_bytes)
    assert predict_peak(by_hand, x.cpu(), device="cuda").peak_bytes == found.peak_bytes
    model.to("sim")
    code, _, paging = found.how.partition("  # or, with the weights: ")
    assert code.endswith("loss = fn(batch)")
    assert paging == ('tenure.paging.page(model.cpu(), "sim:0", training=True, activations="host")')
    whole = model(x).square().mean().item()
    with eval(paging, {"tenure": tenure, "model": model}) as paged:
        loss = paged(x).square().mean()
        loss.backward()
        assert loss.item() == whole


def test_paged_weights_take_what_was_told(sim):
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))).to("sim")
        x = torch.ones(64, 128, device="sim")
        report = predict_peak(model, x)
        found = the_advice_on("page the weights", report)
        n_bytes = sum(p.nbytes for p in model.parameters())
        assert found.saves_bytes == n_bytes * 10 // 12
        assert found.how == f'tenure.paging.page(model.cpu(), "sim:0", budget={n_bytes // 6})'
        model.cpu()
        before = sim.allocated_bytes
        with page(model, "sim", budget=n_bytes // 6) as paged:
            torch.sim.reset_peak_memory_stats()
            paged(x)
            taken = torch.sim.max_memory_allocated() - before + x.nbytes
        # slabs are rounded as the allocator does
        assert taken <= found.peak_bytes + 4096
