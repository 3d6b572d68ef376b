import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adamax,
    torch.optim.Adafactor,
]
FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def train(model, x, make_optimizer, **options):
    optimizer = make_optimizer(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [(make, {}) for make in OPTIMIZERS]
    + [(make, {"foreach": False}) for make in OPTIMIZERS]
    + [(make, {"fused": True}) for make in FUSED],
)
def test_optimizers_train_as_on_the_cpu(sim, make_optimizer, options):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    twin = copy.deepcopy(model).to(sim.device)
    train(model, x, make_optimizer)
    train(twin, x.to(sim.device), make_optimizer, **options)
    torch.testing.assert_close(twin.weight.cpu(), model.weight, rtol=1e-4, atol=1e-5)


def test_an_optimizer_keeps_its_state_on_the_device_and_restores_it(sim):
    layer = nn.Linear(3, 2).to(sim.device)
    x = torch.randn(4, 3, device=sim.device)
    optimizer = train(layer, x, torch.optim.AdamW)
    moments = optimizer.state[layer.weight]["exp_avg"]
    assert moments.device == sim.device
    fresh = torch.optim.AdamW(layer.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(fresh.state[layer.weight]["exp_avg"], moments)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_dropout(sim, reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(sim.device)
    x = torch.randn(4, 8, device=sim.device, requires_grad=True)
    state = sim.module.get_rng_state()
    block(x).sum().backward()
    expected, x.grad = x.grad, None
    sim.module.set_rng_state(state)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_checkpoint_lowers_the_peak(sim):
    blocks = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]).to(sim.device)
    x = torch.randn(256, 32, device=sim.device, requires_grad=True)

    def peak_of(run):
        sim.reset_peak()
        run().sum().backward()
        blocks.zero_grad()
        x.grad = None
        return sim.peak_bytes

    plain = peak_of(lambda: blocks(x))
    saved = peak_of(lambda: checkpoint_sequential(blocks, 4, x, use_reentrant=False))
    assert plain > saved


def test_gradients_are_clipped_and_normed_over_a_list(sim):
    parameter = nn.Parameter(torch.ones(4, device=sim.device))
    parameter.grad = torch.ones(4, device=sim.device)
    norm = nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm.item() == 2
    torch.testing.assert_close(parameter.grad.cpu(), torch.full((4,), 0.5))


def test_function_transforms_run_on_the_device(sim):
    gradient = torch.func.vmap(torch.func.grad(lambda x: x.pow(2).sum()))
    assert gradient(torch.ones(3, 2, device=sim.device)).tolist() == [[2, 2]] * 3
