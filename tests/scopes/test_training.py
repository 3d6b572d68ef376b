"""Training with scopes: bit for bit the run without them, whatever model, optimizer and tool.

Each recipe is run three times: plainly, with a scope around each step, and with model and optimizer
built inside an outer scope as well. Parameters, buffers and optimizer state must agree exactly,
also after one more step once all scopes have closed.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

from tenure import NewDisposeScope, is_disposed

STEPS = 4
Opener = Callable[[], AbstractContextManager[Any]]
Batch = tuple[Tensor, Tensor]


def plain() -> AbstractContextManager[Any]:
    return nullcontext()


class Recipe(NamedTuple):
    """A model, its optimizer, and the batches it is trained on."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: Callable[[], Batch]


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


def step(model: nn.Module, optimizer: Optimizer, batch: Callable[[], Batch]) -> None:
    inputs, targets = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)


def train(recipe: Recipe, around_step: Opener = plain, around_all: Opener = plain) -> object:
    torch.manual_seed(0)
    with around_all():
        model = recipe.model()
        optimizer = recipe.optimizer(model)
        for _ in range(STEPS):
            with around_step():
                step(model, optimizer, recipe.batch)
    step(model, optimizer, recipe.batch)
    return bits([model.state_dict(), optimizer.state_dict()])


def assert_trains_alike(recipe: Recipe) -> None:
    expected = train(recipe)
    assert train(recipe, around_step=NewDisposeScope) == expected
    assert train(recipe, around_step=NewDisposeScope, around_all=NewDisposeScope) == expected


# --- models


def vectors() -> Batch:
    return torch.randn(4, 6), torch.randn(4, 2)


def images() -> Batch:
    return torch.randn(4, 3, 8, 8), torch.randn(4, 2)


def sequences() -> Batch:
    return torch.randn(4, 5, 8), torch.randn(4, 5, 8)


def tokens() -> Batch:
    return torch.randint(0, 10, (4,)), torch.randn(4, 3)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def matrices() -> nn.Module:
    """A model whose parameters are all matrices, as Muon wants them."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))


def cnn() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def sparse_embedding() -> nn.Module:
    return nn.Embedding(10, 3, sparse=True)


def normalized(parametrize: Callable[[nn.Linear], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(parametrize(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
    )


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)


MODELS = {
    "mlp": Recipe(mlp, adam, vectors),
    "cnn with batch norm": Recipe(cnn, adam, images),
    "lstm": Recipe(lambda: Recurrent(nn.LSTM), adam, sequences),
    "gru": Recipe(lambda: Recurrent(nn.GRU), adam, sequences),
    "transformer": Recipe(transformer, adam, sequences),
    "sparse embedding": Recipe(
        sparse_embedding, lambda m: torch.optim.SparseAdam(list(m.parameters())), tokens
    ),
    "embedding bag": Recipe(
        lambda: nn.Sequential(nn.Unflatten(0, (4, 1)), nn.EmbeddingBag(10, 3)), adam, tokens
    ),
    "spectral norm": Recipe(normalized(parametrizations.spectral_norm), adam, vectors),
    "weight norm": Recipe(normalized(parametrizations.weight_norm), adam, vectors),
    "orthogonal": Recipe(normalized(parametrizations.orthogonal), adam, vectors),
    "hook-based spectral norm": Recipe(normalized(nn.utils.spectral_norm), adam, vectors),
    "pruned": Recipe(normalized(pruned), adam, vectors),
    "lazy": Recipe(lazy, sgd, images),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")  # at each use, for years
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # the encoder's fast path
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")  # the old one is tested too
@pytest.mark.parametrize("recipe", MODELS.values(), ids=MODELS)
def test_a_model_trains_bit_for_bit_alike(recipe):
    assert_trains_alike(recipe)


# --- optimizers

OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"lr": torch.tensor(0.01)}],
    "AdamW": [{"amsgrad": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "LBFGS": [{"line_search_fn": "strong_wolfe"}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1}],
}
FUSED_ON_CPU = ("Adam", "AdamW", "SGD", "Adagrad")


def configurations() -> Iterator[Any]:
    for kind in OPTIMIZERS:
        name = kind.__name__
        parameters = inspect.signature(kind).parameters
        options = [{}, *VARIANTS.get(name, [])]
        if "foreach" in parameters:
            options += [{"foreach": True}, {"foreach": False}]
        if name in FUSED_ON_CPU:
            options += [{"fused": True}]
        for chosen in options:
            yield pytest.param(kind, chosen, id=f"{name}-{chosen or 'default'}")


@pytest.mark.parametrize(("kind", "options"), list(configurations()))
def test_an_optimizer_trains_bit_for_bit_alike(kind, options):
    settings = {"lr": 0.01, **options}
    if kind is torch.optim.SparseAdam:
        recipe = Recipe(sparse_embedding, lambda m: kind(list(m.parameters()), **settings), tokens)
    else:
        model = matrices if kind.__name__ == "Muon" else mlp
        recipe = Recipe(model, lambda m: kind(m.parameters(), **settings), vectors)
    assert_trains_alike(recipe)


def test_every_optimizer_of_torch_is_covered():
    names = {kind.__name__ for kind in OPTIMIZERS}
    assert names >= {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS"}
    assert names >= {"Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"}


class Lion(Optimizer):
    """A third party's: its state is made by code of its own, in the first step."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.norms: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        norms = []
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["nested"] = {"count": [torch.zeros(())]}
                state["nested"]["count"][0] += 1
                state["momentum"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(group["lr"] * state["momentum"].sign())
                norms.append(parameter.norm())
        self.norms = norms


def test_an_optimizer_of_a_third_party_trains_bit_for_bit_alike():
    assert_trains_alike(Recipe(mlp, lambda m: Lion(m.parameters()), vectors))


def test_attributes_of_an_optimizer_outlive_the_step_that_made_them():
    model = mlp()
    optimizer = Lion(model.parameters())
    with NewDisposeScope():
        step(model, optimizer, vectors)
    assert not any(map(is_disposed, optimizer.norms))


def test_nothing_but_the_model_and_the_optimizer_survives_a_step():
    with NewDisposeScope("outer") as outer:
        model = cnn()
        optimizer = adam(model)
        with NewDisposeScope("step") as scope:
            inputs, targets = images()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            assert all(tensor in scope for tensor in (inputs, targets, loss))
        assert all(map(is_disposed, (inputs, targets, loss)))
        assert len(outer) == 0
