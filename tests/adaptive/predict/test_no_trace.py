"""What work leaves behind is gone when its prediction ends, however it ends."""

import signal
import sys

import pytest
import torch
from torch import nn

from tenure.adaptive import predict_peak

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
    class Hiding:
        def __init__(self):
            self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def __call__(self, x):
            return vars(self)["head"](vars(self)["net"](x)).sum()

    fn = Hiding()
    fn.head.weight.grad = before = torch.ones(1, 4)
    report = predict_peak(fn, torch.ones(2, 4))
    assert report.approximate
    assert fn.net.weight.grad is None
    assert fn.head.weight.grad is before
    assert before.equal(torch.ones(1, 4))
