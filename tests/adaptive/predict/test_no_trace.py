"""What work leaves behind is gone when its prediction ends, however it ends."""

import gc
import signal
import sys
from importlib import import_module

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tenure import DisposedTensorError
from tenure.adaptive import PredictionError, memory_budget, plan, predict_peak, step

from ..step.step_cases import unseen
from ..unchanged import unchanged


def test_nothing_is_left_of_a_prediction():
    class Caching(nn.Sequential):
        pass

    model = Caching(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.LSTM(8, 8))
    model[0].weight.grad = torch.full((8, 8), 2.0)
    model[0].weight.note = "kept"
    optimizer = torch.optim.AdamW(model.parameters())
    handles = {name: (id(p), p.data_ptr(), type(p)) for name, p in model.named_parameters()}
    batch, calls = torch.randn(4, 8), []
    model[0].bias.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape))

    def fn(x):
        model.seen = model[:3](x)
        return model[3](model.seen)[0].sum()

    with unchanged(model):
        predict_peak(fn, batch, optimizer=optimizer)
    assert calls == [(8,)]
    assert optimizer.state == {}
    assert {n: (id(p), p.data_ptr(), type(p)) for n, p in model.named_parameters()} == handles
    assert model[0].weight.note == "kept"


class Growing(nn.Module):
    """Makes a parameter, a module, a buffer and a hook at its first call, and keeps a cache."""

    def __init__(self):
        super().__init__()
        self.first, self.cache = nn.Linear(4, 4), {}

    def forward(self, x):
        if "scale" not in self._parameters:
            self.scale = nn.Parameter(torch.ones(4))
            self.second = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))
            self.register_full_backward_hook(lambda *_: None)
        self.first.output = self.first(x)
        self.cache[x.shape] = self.first.output
        return self.second(self.first.output * self.scale).sum()


def test_what_a_first_call_makes_is_not_left_without_data():
    model = Growing()
    with unchanged(model):
        predict_peak(model, torch.ones(2, 4))
    assert list(model._parameters) == list(model._buffers) == []
    assert not model.cache
    assert not model._backward_hooks
    model(torch.ones(2, 4)).backward()
    assert type(model.scale.grad) is torch.Tensor


def test_a_parameter_that_the_work_replaces_or_deletes_is_there_again():
    model = nn.Linear(4, 4)
    weight = model.weight

    def fn(x):
        model.weight = nn.Parameter(model.weight * 2)
        del model.bias
        torch.set_grad_enabled(False)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        predict_peak(fn, torch.ones(2, 4))
    assert model.weight is weight
    assert list(model._parameters) == ["weight", "bias"]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "scripted", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 8))]
)
def test_a_module_of_torchscript_is_refused_and_trains_on(scripted):
    model = scripted(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with pytest.raises(PredictionError, match=r"Module is a module of TorchScript"):
        predict_peak(lambda x: model(x).square().mean(), torch.ones(2, 8))
    assert all(p.grad is None for p in model.parameters())


def test_lists_in_the_state_of_an_optimizer_are_as_before():
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss(x):
        return model(x).square().mean()

    def closure():
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        return value

    optimizer.step(closure)
    state = optimizer.state[model.weight]
    before = {name: [*value] for name, value in state.items() if isinstance(value, list)}
    predict_peak(loss, batch, optimizer=optimizer)
    assert optimizer.state[model.weight] is state
    assert before["old_dirs"]
    for name, values in before.items():
        assert all(a is b for a, b in zip(state[name], values, strict=True))
    optimizer.step(closure)


def test_scalers_schedules_and_lists_that_the_work_names_are_as_before():
    model, kept = nn.Linear(4, 4), []
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")

    def train(x):
        loss = model(x).sum()
        kept.append(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    predict_peak(train, torch.ones(2, 4))
    assert not kept
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert scaler._scale is None
    train(torch.ones(2, 4))
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("is_back", [False, True])
def test_an_interrupt_waits_until_all_tensors_have_their_data(is_back):
    # also where the tests were started in the background, which ignores it
    handler = signal.default_int_handler
    ignored = signal.signal(signal.SIGINT, handler)
    model, n_lent, interrupted = nn.Linear(4, 4), {0}, []

    def look(*_):
        lent = sum(type(p) is not nn.Parameter for p in model._parameters.values())
        if lent == 1 and (2 in n_lent) is is_back:
            sys.setprofile(None)
            interrupted.append(lent)
            signal.raise_signal(signal.SIGINT)
        n_lent.add(lent)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with pytest.raises(KeyboardInterrupt):
            predict_peak(model, torch.ones(2, 4))
    finally:
        sys.setprofile(before)
        found = signal.signal(signal.SIGINT, ignored)
    assert interrupted == [1]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(type(p.data) is torch.Tensor for p in model.parameters())
    assert found is handler


def test_parameters_that_no_name_leads_to_keep_their_gradients():
    net, head = nn.Linear(4, 4), nn.Linear(4, 1)
    run = unseen(nn.Sequential(net, head))
    head.weight.grad = before = torch.ones(1, 4)
    report = predict_peak(lambda x: run(x).sum(), torch.ones(2, 4))
    assert report.approximate
    assert net.weight.grad is None
    assert head.weight.grad is before
    assert before.equal(torch.ones(1, 4))


# --- caches that training would take tensors without data from


@pytest.fixture
def masks():
    """The module, made anew: what was there before the tests is hidden from searches."""
    name = f"{__package__}.masks"
    sys.modules.pop(name, None)
    return import_module(name)


def _n_fakes():
    return sum(type(each) is FakeTensor for each in gc.get_objects())


def predicted_step(fn, batch):
    return step(fn, batch, predict=True)


def planned(fn, batch):
    return plan(fn, batch, "1MiB")


def failing(fn, batch):
    with pytest.raises(ZeroDivisionError):
        predict_peak(lambda x: fn(x) / (1 // 0), batch)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("cached", predict_peak),
        ("in_dict", predict_peak),
        ("in_global", predict_peak),
        ("on_object", predict_peak),
        ("in_closure", predict_peak),
        ("cached", planned),
        ("cached", predicted_step),
        ("in_global", failing),
    ],
)
def test_a_cache_that_a_prediction_filled_holds_no_fakes(masks, name, ask):
    net, batch, before = masks.Net(vars(masks)[name]), torch.ones(8, 4), _n_fakes()
    with memory_budget("1MiB"):
        ask(lambda x: net(x).square().mean(), batch)
    assert _n_fakes() == before
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor


def test_a_hook_that_keeps_what_it_sees_keeps_no_fakes():
    net, seen = nn.Linear(4, 4), []
    net.register_forward_hook(lambda module, args, output: seen.append(output))
    net.weight.register_hook(seen.append)
    predict_peak(net, torch.ones(8, 4))
    assert not seen


@pytest.mark.parametrize("ask", [predict_peak, predicted_step])
def test_a_holder_that_nobody_knows_is_named_before_anything_trains(masks, ask):
    net, batch = masks.Net(masks.of_thread), torch.ones(8, 4)
    found = r"mask'\], which now holds a tensor without data \(float32\[4, 4\]"
    with pytest.raises(PredictionError, match=found), memory_budget("1MiB"):
        ask(lambda x: net(x).mean(), batch)
    assert net.linear.weight.grad is None
    with pytest.raises(DisposedTensorError):
        net(batch)
    del masks.SPACE.mask
    net(batch).sum().backward()
    assert type(net.linear.weight.grad) is torch.Tensor
