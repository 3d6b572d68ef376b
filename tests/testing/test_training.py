"""Models train on the device as on the CPU; `tests/sweeps` has each operator alone."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.LSTM(3, 5, num_layers=2, bidirectional=True), torch.randn(4, 2, 3)),
        (nn.GRU(3, 5, bias=False), torch.randn(4, 2, 3)),
        (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
        (nn.EmbeddingBag(5, 3), torch.tensor([[1, 1], [4, 0]])),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)),
    ],
)
def test_layers_train_as_on_the_cpu(sim, module, inputs):
    twin = copy.deepcopy(module).to(sim.device)
    expected, actual = tree_leaves(module(inputs)), tree_leaves(twin(inputs.to(sim.device)))
    for result in (expected, actual):
        sum(each.sum() for each in result).backward()
    torch.testing.assert_close([each.cpu() for each in actual], expected)
    gradients = [[p.grad for p in each.parameters()] for each in (twin.cpu(), module)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(module.named_buffers()))


@torch.no_grad()
def test_an_encoder_takes_its_fast_path_with_a_padding_mask_as_on_the_cpu(sim):
    layer = nn.TransformerEncoderLayer(4, 2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    expected = encoder(x, src_key_padding_mask=mask)
    twin = copy.deepcopy(encoder).to(sim.device)
    actual = twin(x.to(sim.device), src_key_padding_mask=mask.to(sim.device))
    torch.testing.assert_close(actual.cpu(), expected)


def train(model, x, make_optimizer, **options):
    optimizer = make_optimizer(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Adafactor"])
def test_optimizers_train_as_on_the_cpu(sim, name):
    torch.manual_seed(0)
    start, x, make = nn.Linear(3, 2), torch.randn(4, 3), getattr(torch.optim, name)
    model = copy.deepcopy(start)
    train(model, x, make)
    fused = [] if name == "Adafactor" else [{"fused": True}]
    for options in ({}, {"foreach": False}, *fused):
        twin = copy.deepcopy(start).to(sim.device)
        optimizer = train(twin, x.to(sim.device), make, **options)
        torch.testing.assert_close(twin.weight.cpu(), model.weight, rtol=1e-4, atol=1e-5)
    fresh = make(twin.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, value in optimizer.state[twin.weight].items():
        if isinstance(value, torch.Tensor):
            restored = fresh.state[twin.weight][key]
            assert restored.device == value.device
            assert torch.equal(restored, value)
            assert value.dim() == 0 or value.device == sim.device


def test_a_module_keeps_its_parameters_ties_gradients_and_hooks_on_the_way(sim):
    embedding, head, called = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), []
    head.weight = weight = embedding.weight
    model, x = nn.Sequential(embedding, head), torch.tensor([1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).sum().backward()
    weight.register_hook(lambda grad: called.append("tensor"))
    handle = weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    gradient, before = weight.grad.clone(), weight.detach().clone()
    model.to(sim.device)
    assert head.weight is embedding.weight is weight
    assert weight.device == weight.grad.device == sim.device
    assert sim.allocated_bytes == 2 * 4 * 3 * 4
    assert torch.equal(weight.grad.cpu(), gradient)
    optimizer.step()
    torch.testing.assert_close(weight.cpu(), before - gradient)
    model(x.to(sim.device)).sum().backward()
    assert called == ["tensor", "accumulated"]
    handle.remove()
    model.zero_grad()
    model.cpu()
    assert head.weight is embedding.weight is weight
    assert weight.device.type == "cpu"
    assert sim.allocated_bytes == 0
    model(x).sum().backward()
    assert called == ["tensor", "accumulated", "tensor"]


def test_data_may_be_set_across_devices_and_within_one(sim):
    parameter = nn.Parameter(torch.zeros(2))
    for n in (3, 4):
        parameter.data = torch.ones(n, device=sim.device)
        assert (parameter.device, parameter.shape) == (sim.device, (n,))
        assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
    assert parameter.data.requires_grad is False


def test_products_run_low_sums_in_float32_and_mixed_arguments_in_the_widest_type(sim):
    x, dtype = torch.randn(4, 4, device=sim.device), torch.float16
    with torch.autocast("sim", dtype=dtype):
        product = x @ x
        for each in (product, product.relu(), nn.functional.linear(x, x)):
            assert each.dtype == dtype
        assert nn.functional.conv1d(x[None], x[:, :, None]).dtype == dtype
        for function in (torch.exp, torch.sum, lambda t: t.softmax(-1), lambda t: t.pow(2)):
            assert function(product).dtype == torch.float32
        assert nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        assert torch.sum(product, dtype=dtype).dtype == dtype
        assert torch.dot(product[0], x[0]).dtype == torch.float32
        assert (x.double() @ x.double()).dtype == torch.float64
        with torch.autocast("sim", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_a_weight_used_twice_is_cast_once_and_forgotten_after(sim):
    layer = nn.Linear(64, 64, bias=False).to(sim.device)
    x = torch.randn(1, 64, device=sim.device, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("sim", dtype=torch.bfloat16):
        before_bytes = sim.allocated_bytes
        layer(layer(x))
        assert sim.allocated_bytes == before_bytes + 64 * 64 * 2
    assert sim.allocated_bytes == before_bytes


def test_gradients_arrive_in_the_type_of_the_weights_and_a_scaler_skips_and_backs_off(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        logits = model(torch.randn(3, 4, device=sim.device))
        target = torch.zeros(3, dtype=torch.long, device=sim.device)
        loss = nn.functional.cross_entropy(logits, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    weight = nn.Parameter(torch.ones(2, device=sim.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    for factor, value, scale in ((1, 0, 4.0), (torch.inf, 0, 2.0)):
        optimizer.zero_grad()
        scaler.scale(factor * weight[0] + weight[1]).backward()
        assert weight.grad.tolist() == [4 * factor, 4]
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [value, value]
        assert scaler.get_scale() == scale


def test_device_and_host_draw_from_sequences_of_their_own(sim):
    torch.manual_seed(3)
    torch.rand(4, device=sim.device)
    host = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), host)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_and_a_saved_state_bring_back_the_same_dropout(sim, reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(sim.device)
    x = torch.randn(4, 8, device=sim.device, requires_grad=True)
    state = sim.module.get_rng_state()
    first = block(x)
    first.sum().backward()
    assert not torch.equal(block(x), first)
    expected, x.grad = x.grad, None
    sim.module.set_rng_state(state)
    again = checkpoint(block, x, use_reentrant=reentrant)
    assert torch.equal(again, first)
    again.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_failed_operation_draws_nothing_and_leaves_running_statistics_as_they_were(sim):
    dropout, x = nn.functional.dropout, torch.ones(64, device=sim.device)
    layer, samples = nn.BatchNorm1d(3).to(sim.device), torch.randn(5, 3).to(sim.device) + 5
    torch.manual_seed(3)
    expected = dropout(x)
    torch.manual_seed(3)
    for fail in (lambda: dropout(x), lambda: layer(samples)):
        sim.fail_at(1)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            fail()
    assert torch.equal(dropout(x), expected)
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert layer.running_var.tolist() == [1, 1, 1]
    layer(samples)
    assert layer.running_mean.mean() > 0


def test_threads_that_draw_on_the_device_leave_the_state_of_the_host_alone(sim, monkeypatch):
    set_state, before = torch.set_rng_state, torch.get_rng_state()

    def set_and_let_other_threads_run(state):
        set_state(state)
        time.sleep(0.0001)

    monkeypatch.setattr(torch, "set_rng_state", set_and_let_other_threads_run)
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda _: torch.randn(10, device=sim.device), range(80)))
    assert torch.equal(torch.get_rng_state(), before)


class HookError(Exception):
    pass


def fail(*args):
    raise HookError("raised by a hook")


def leaf(sim):
    return torch.ones(4, device=sim.device, requires_grad=True)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    backward = staticmethod(fail)


def of_a_tensor(x):
    x.register_hook(fail)
    return x.exp()


def after_accumulation(x):
    x.register_post_accumulate_grad_hook(fail)
    return x.exp()


def of_unpacking(x):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, fail):
        return (x * 2).exp()


@pytest.mark.parametrize("make", [of_a_tensor, after_accumulation, of_unpacking, Failing.apply])
def test_an_error_of_a_hook_reaches_the_caller_and_the_next_pass_is_right(sim, make):
    y = leaf(sim)
    with pytest.raises(HookError, match="raised by a hook"):
        make(leaf(sim)).sum().backward()
    (y * 2).sum().backward()
    assert y.grad.tolist() == [2, 2, 2, 2]


def test_threads_that_fail_together_each_raise_an_error_of_a_hook(sim):
    def work(_):
        with pytest.raises(HookError):
            of_a_tensor(leaf(sim)).sum().backward()

    with ThreadPoolExecutor(4) as executor:
        assert len(list(executor.map(work, range(40)))) == 40


@pytest.mark.parametrize("retains", [False, True])
def test_memory_is_exact_as_soon_as_a_pass_has_ended(sim, retains):
    x = torch.ones(100, device=sim.device, requires_grad=True)
    resting_bytes = sim.allocated_bytes
    for number in range(1, 60):
        loss = x.exp().sin().sum()
        # the loss, and what exp() and sin() both keep
        assert sim.allocated_bytes == resting_bytes + 400 + 4
        sim.fail_at(1 + number % 3)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            loss.backward(retain_graph=True)
        x.grad = None
        assert sim.allocated_bytes == resting_bytes + 400 + 4
        loss.backward(retain_graph=retains)
        # the gradient is in the place of what was kept
        assert sim.allocated_bytes == resting_bytes + 400 + 4 + 400 * retains
        torch.testing.assert_close(x.grad, x.detach().exp() * x.detach().exp().cos())
        del loss
        x.grad = None
        assert sim.allocated_bytes == resting_bytes
