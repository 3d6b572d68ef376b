"""What a prediction says of an accelerator is what the simulated one then counts."""

import pytest
import torch
from torch import nn

from tenure.adaptive import PredictionError, predict_peak

from .true_peak import step_of


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh())


def wide():
    """Its parameters are much, its activations are little: the peak is the optimizer's."""
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(8)))


def transformer():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


_MODELS = {
    "mlp": (mlp, (512, 64)),
    "large batch": (mlp, (20_000, 64)),
    "wide": (wide, (4, 700)),
    "transformer": (transformer, (8, 32, 64)),
    "long sequences": (transformer, (16, 400, 64)),
}
_OPTIMIZERS = {
    "none": lambda parameters: None,
    "adamw": torch.optim.AdamW,
    "one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}


def squared(model):
    return lambda x: model(x).square().mean()


@pytest.mark.sim_allocator("cuda")
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("name", _MODELS)
def test_a_step_takes_of_an_accelerator_what_was_predicted(sim, name, optimizer):
    make, shape = _MODELS[name]
    model = make().to(sim.device)
    batch = torch.randn(shape).to(sim.device)
    stepped = _OPTIMIZERS[optimizer](model.parameters())
    report = predict_peak(squared(model), batch, optimizer=stepped)
    assert sim.peak_bytes == sim.allocated_bytes
    kept = step_of(squared(model), batch, stepped)()
    stats = sim.module.memory_stats()
    assert report.device == str(sim.device)
    assert report.peak_bytes == stats["requested_bytes.all.peak"]
    assert report.allocated_bytes == stats["allocated_bytes.all.peak"]
    assert report.reserved_bytes == stats["reserved_bytes.all.peak"]
    assert not report.approximate
    del kept
