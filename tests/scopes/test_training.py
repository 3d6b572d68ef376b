"""Training with scopes: bit for bit the run without them, whatever model, optimizer and tool.

Each recipe is run three times: plainly, with a scope around each step, and with model and optimizer
built inside an outer scope as well. Parameters, buffers and optimizer state must agree exactly,
also after one more step once all scopes have closed.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

from tenure import NewDisposeScope, is_disposed


def bits(tree: object) -> object:
    """A copy of ``tree`` that compares exactly and shares nothing with it."""
    if isinstance(tree, Tensor):
        dense = tree.detach().to_dense() if tree.layout is not torch.strided else tree.detach()
        return str(dense.dtype), tuple(dense.shape), dense.contiguous().numpy().tobytes()
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [bits(value) for value in tree]
    return tree


def assert_trains_alike(prepare: Callable[[], list[Any]], body: Callable[..., None]) -> None:
    """Of what is prepared, all has a state; the body makes a step with it."""

    def run(around_step=nullcontext, around_all=nullcontext) -> object:
        torch.manual_seed(0)
        with around_all():
            tools = prepare()
            for _ in range(2):
                with around_step():
                    body(*tools)
        body(*tools)
        return bits([tool.state_dict() for tool in tools])

    expected = run()
    assert run(NewDisposeScope) == expected
    assert run(NewDisposeScope, NewDisposeScope) == expected


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4, 2)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randn(4, 2)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10, (4,)), torch.randn(4, 3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def cnn() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
    )


def normalized(norm: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))


class Lion(Optimizer):
    """A third party's: its state is made by code of its own, in the first step."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["nested"] = {"count": [torch.zeros(())]}
                state["nested"]["count"][0] += 1
                state["momentum"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(group["lr"] * state["momentum"].sign())
        # no state, but made in a step: it is no scope's
        self.norm = getattr(self, "norm", 0) + parameter.norm()


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


RECIPES = {
    "cnn with batch norm": (cnn, images, adam),
    "spectral norm": (normalized(parametrizations.spectral_norm), vectors, adam),
    "spectral norm by a hook": (normalized(nn.utils.spectral_norm), vectors, adam),
    "lazy": (lazy, images, adam),
    "sparse": (lambda: nn.Embedding(10, 3, sparse=True), tokens, torch.optim.SparseAdam),
    "SGD": (mlp, vectors, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True)),
    "Adam": (mlp, vectors, lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True)),
    "AdamW": (mlp, vectors, lambda p: torch.optim.AdamW(p, foreach=True)),
    "fused AdamW": (mlp, vectors, lambda p: torch.optim.AdamW(p, fused=True)),
    "Adafactor": (mlp, vectors, torch.optim.Adafactor),
    "LBFGS": (mlp, vectors, lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe")),
    "Lion": (mlp, vectors, Lion),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")  # at each use, for years
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize(("make", "batch", "optimizer"), RECIPES.values(), ids=RECIPES)
def test_a_model_and_an_optimizer_train_bit_for_bit_alike(make, batch, optimizer):
    def prepare() -> list[Any]:
        model = make()
        return [model, optimizer(list(model.parameters()))]

    def body(model: nn.Module, optimizer: Optimizer) -> None:
        inputs, targets = batch()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    assert_trains_alike(prepare, body)


def test_autocast_a_scaler_clipping_an_average_and_a_schedule_of_a_tensor_train_alike():
    def prepare() -> list[Any]:
        model = cnn()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
        schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        averaging = swa_utils.get_ema_multi_avg_fn(0.9)
        average = swa_utils.AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", 64.0)
        return [model, optimizer, scaler, average, lr_scheduler.ChainedScheduler([schedule])]

    def body(model, optimizer, scaler, average, schedule) -> None:
        inputs, targets = images()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        average.update_parameters(model)
        swa_utils.update_bn([images()[0]], average)
        schedule.step()

    assert_trains_alike(prepare, body)


# --- what is done to a module inside a scope


CHANGES = {
    "deepcopy": copy.deepcopy,
    "to channels last": lambda model: model.to(memory_format=torch.channels_last),
    "load_state_dict(assign)": lambda model: load(model, assign=True),
    "register_buffer": lambda model: model.register_buffer("scale", torch.ones(2)) or model,
    "new buffer by attribute": lambda model: (
        setattr(model[0][1], "running_mean", torch.ones(4)) or model
    ),
    "new parameter": lambda model: setattr(model, "extra", nn.Parameter(torch.ones(2))) or model,
    "to_empty": lambda model: load(cnn().to("meta").to_empty(device="cpu"), assign=False),
}


def load(model: nn.Module, *, assign: bool) -> nn.Module:
    torch.manual_seed(5)
    model.load_state_dict(
        {name: value * 0 + 2 for name, value in cnn().state_dict().items()}, assign=assign
    )
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_changed_inside_a_scope_is_whole_outside(change):
    torch.manual_seed(0)
    expected = bits(change(cnn()).state_dict())
    torch.manual_seed(0)
    model = cnn()
    with NewDisposeScope():
        changed = change(model)
        state = changed.state_dict()
    assert bits(state) == bits(changed.state_dict()) == expected
    assert changed(images()[0]).shape == (4, 2)


# --- data


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_a_loader_are_of_the_scope_that_fetches_them_and_the_loader_goes_on(num_workers):
    dataset = TensorDataset(torch.arange(12.0).view(6, 2))
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=num_workers))
    totals = []
    with NewDisposeScope() as scope:
        (rows,) = next(batches)
        totals.append(rows.sum().item())
        scope.attach(rows)
    assert is_disposed(rows)
    for (rows,) in batches:  # fetched outside: they are no scope's
        with NewDisposeScope():
            doubled = rows * 2
            totals.append(doubled.sum().item() / 2)
        assert is_disposed(doubled)
        assert not is_disposed(rows)
    assert totals == [6.0, 22.0, 38.0]
