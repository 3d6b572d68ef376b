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
from tests.adaptive.ranks.launch import run_ranks

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


# --- what stands around a step


class Tools(NamedTuple):
    """What a training loop has made for one model, under the names it is known by."""

    model: nn.Module
    optimizer: Optimizer
    state: dict[str, Any]


def run_loop(
    prepare: Callable[[], Tools],
    body: Callable[[Tools], None],
    around_step: Opener = plain,
    around_all: Opener = plain,
) -> object:
    torch.manual_seed(0)
    with around_all():
        tools = prepare()
        for _ in range(STEPS):
            with around_step():
                body(tools)
    body(tools)
    kept = {name: tool.state_dict() for name, tool in tools.state.items()}
    return bits([tools.model.state_dict(), tools.optimizer.state_dict(), kept])


def assert_loops_alike(prepare: Callable[[], Tools], body: Callable[[Tools], None]) -> None:
    expected = run_loop(prepare, body)
    assert run_loop(prepare, body, NewDisposeScope) == expected
    assert run_loop(prepare, body, NewDisposeScope, NewDisposeScope) == expected


def tools_for(**makers: Callable[[nn.Module, Optimizer], Any]) -> Callable[[], Tools]:
    def prepare() -> Tools:
        model = cnn()
        optimizer = adam(model)
        state = {name: make(model, optimizer) for name, make in makers.items()}
        return Tools(model, optimizer, state)

    return prepare


def loss_of(model: nn.Module) -> Tensor:
    inputs, targets = images()
    return F.mse_loss(model(inputs).float(), targets)


def test_autocast_trains_alike():
    def body(tools: Tools) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(tools.model)
        loss.backward()
        tools.optimizer.step()
        tools.optimizer.zero_grad()

    assert_loops_alike(tools_for(), body)


def test_a_gradient_scaler_trains_alike():
    def body(tools: Tools) -> None:
        scaler = tools.state["scaler"]
        scaler.scale(loss_of(tools.model)).backward()
        scaler.unscale_(tools.optimizer)
        scaler.step(tools.optimizer)
        scaler.update()
        tools.optimizer.zero_grad(set_to_none=False)

    assert_loops_alike(tools_for(scaler=lambda *_: torch.amp.GradScaler("cpu", 64.0)), body)


@pytest.mark.parametrize("clip", ["norm", "norm by foreach", "value"])
def test_clipped_gradients_train_alike(clip):
    def body(tools: Tools) -> None:
        loss_of(tools.model).backward()
        parameters = list(tools.model.parameters())
        if clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        else:
            nn.utils.clip_grad_norm_(parameters, 0.1, foreach=clip != "norm")
        tools.optimizer.step()
        tools.optimizer.zero_grad()

    assert_loops_alike(tools_for(), body)


def test_an_average_of_the_model_trains_alike():
    def averaged(model: nn.Module, _: Optimizer) -> nn.Module:
        average = swa_utils.get_ema_multi_avg_fn(0.9)
        return swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)

    def body(tools: Tools) -> None:
        loss_of(tools.model).backward()
        tools.optimizer.step()
        tools.optimizer.zero_grad()
        tools.state["average"].update_parameters(tools.model)
        swa_utils.update_bn([images()[0]], tools.state["average"])

    assert_loops_alike(tools_for(average=averaged), body)


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_a_schedule_trains_alike(schedule, tensor_lr):
    def prepare() -> Tools:
        model = mlp()
        lr = torch.tensor(0.01) if tensor_lr else 0.01
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        return Tools(model, optimizer, {"schedule": schedule(optimizer)})

    def body(tools: Tools) -> None:
        step(tools.model, tools.optimizer, vectors)
        tools.state["schedule"].step()

    assert_loops_alike(prepare, body)


def test_a_plateau_schedule_may_look_at_the_loss_of_the_step():
    def body(tools: Tools) -> None:
        loss = loss_of(tools.model)
        loss.backward()
        tools.optimizer.step()
        tools.optimizer.zero_grad()
        tools.state["schedule"].step(loss.detach())

    assert_loops_alike(
        tools_for(schedule=lambda _, o: lr_scheduler.ReduceLROnPlateau(o, patience=0)), body
    )


# --- what is done to a module inside a scope


CHANGES = {
    "deepcopy": lambda model: copy.deepcopy(model),
    "double": lambda model: model.double(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "to channels last": lambda model: model.to(memory_format=torch.channels_last),
    "load_state_dict": lambda model: load(model, assign=False),
    "load_state_dict(assign)": lambda model: load(model, assign=True),
    "register_buffer": lambda model: model.register_buffer("scale", torch.ones(2)) or model,
    "new buffer by attribute": lambda model: (
        setattr(model[0][1], "running_mean", torch.ones(4)) or model
    ),
    "new parameter": lambda model: setattr(model, "extra", nn.Parameter(torch.ones(2))) or model,
    "to_empty": lambda model: load(cnn().to("meta").to_empty(device="cpu"), assign=False),
    "requires_grad": lambda model: model.requires_grad_(False),
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
    assert not any(map(is_disposed, [*changed.parameters(), *changed.buffers()]))
    assert bits(state) == expected
    dtype = next(changed.parameters()).dtype
    assert changed(images()[0].to(dtype)).shape == (4, 2)


def test_a_state_dict_taken_in_a_scope_aliases_the_live_model():
    model = cnn()
    with NewDisposeScope():
        state = model.state_dict()
    assert not any(map(is_disposed, state.values()))
    assert bits(state) == bits(model.state_dict())


def test_a_functional_call_with_tensors_of_the_scope_leaves_the_module_alone():
    model = mlp().eval()
    before = bits(model.state_dict())
    with NewDisposeScope():
        doubled = {name: value * 2 for name, value in model.state_dict().items()}
        torch.func.functional_call(model, doubled, vectors()[0])
    assert bits(model.state_dict()) == before
    assert model(vectors()[0]).shape == (4, 2)


# --- data


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # as many workers as cores or not
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
    ],
    ids=["in process", "two workers", "a persistent worker"],
)
def test_batches_of_a_loader_arrive_whole_and_go_with_their_scope(options):
    dataset = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    loader = DataLoader(dataset, batch_size=2, **options)
    for _ in range(2):
        sums = []
        for rows, labels in loader:  # fetched outside: they are no scope's
            with NewDisposeScope() as scope:
                assert rows not in scope
                doubled = rows * 2
                sums.append(doubled.sum().item() + labels.sum().item())
            assert is_disposed(doubled)
            assert not is_disposed(rows)
        assert sums == [13.0, 49.0, 85.0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_fetched_inside_a_scope_die_with_it_and_the_loader_goes_on(num_workers):
    dataset = TensorDataset(torch.arange(12.0).view(6, 2))
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=num_workers))
    totals = []
    for _ in range(3):
        with NewDisposeScope() as scope:
            (rows,) = next(batches)
            totals.append(rows.sum().item())
            scope.attach(rows)
        assert is_disposed(rows)
    assert totals == [6.0, 22.0, 38.0]


# --- data-parallel


def train_in_parallel(rank: int, folder: str, in_scopes: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    opener = NewDisposeScope if in_scopes else plain
    torch.manual_seed(0)
    with opener():
        model = DistributedDataParallel(cnn())
        optimizer = adam(model)
        torch.manual_seed(rank)
        for _ in range(STEPS):
            with opener():
                step(model, optimizer, images)
    step(model, optimizer, images)
    torch.save(bits(model.state_dict()), f"{folder}/{in_scopes}-{rank}.pt")


@pytest.mark.slow
def test_two_ranks_train_bit_for_bit_alike(tmp_path):
    for in_scopes in (False, True):
        run_ranks(train_in_parallel, 2, folder=str(tmp_path), in_scopes=in_scopes)
    plain_0, scoped_0, scoped_1 = (
        torch.load(tmp_path / name, weights_only=False)
        for name in ("False-0.pt", "True-0.pt", "True-1.pt")
    )
    assert scoped_0 == plain_0
    weights = [name for name in scoped_0 if "running" not in name]
    assert [scoped_1[name] for name in weights] == [scoped_0[name] for name in weights]
