"""State that a module or an optimizer holds when a block ends is theirs, however it came there."""

import copy
import gc
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    attach_to_scope,
    is_disposed,
    owner_of,
    statistics,
)
from tests.programs import run_program


def trained_optimizer(
    cls: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = cls(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def loaded(thing: object) -> object:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def write_past(module: nn.Module) -> Tensor:
    """Give a module a buffer past all that it is asked for."""
    module._buffers["running_mean"] = torch.zeros(2)
    return module._buffers["running_mean"]


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.LBFGS])
def test_optimizer_state_loaded_in_a_block_is_the_optimizers(cls):
    _, trained = trained_optimizer(cls)
    model = nn.Linear(2, 2)
    optimizer = cls(model.parameters())  # it has never stepped, so no hook of torch has told of it
    with NewDisposeScope():
        optimizer.load_state_dict(loaded(trained.state_dict()))
    train(model, optimizer)


def test_state_written_into_an_optimizer_in_a_block_is_the_optimizers_however_deep():
    model, optimizer = trained_optimizer()
    nested = optimizer.state[model.weight]["preconditioner"] = {}
    nested["itself"] = nested  # a cycle must not keep the search busy
    with NewDisposeScope():
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 2)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        nested["blocks"] = [{"factors": ([torch.ones(2)],)}]
    assert not is_disposed(nested["blocks"][0]["factors"][0][0])
    train(model, optimizer)


@pytest.mark.parametrize("made", [nn.BatchNorm1d, lambda n: copy.deepcopy(nn.BatchNorm1d(n))])
def test_a_buffer_written_past_the_module_is_the_modules(made):
    module = made(2)
    statistics().reset()
    with NewDisposeScope(policy="report") as scope:
        buffer = write_past(module)
        mine = torch.ones(2)
        scope.dispose_everything()
        assert is_disposed(mine)
        assert owner_of(buffer) is None
        buffer = write_past(module)
    assert not is_disposed(buffer)
    assert len(scope.leaks) == 0
    assert statistics().detached_from_scope == 2


def test_modules_and_optimizers_that_are_unpickled_copied_or_changed_in_a_block_are_whole():
    model, optimizer = trained_optimizer()
    with NewDisposeScope():
        norm = loaded(nn.BatchNorm1d(2))
        copied = copy.deepcopy(optimizer)
        parametrizations.orthogonal(model)
    copied.step()
    assert norm(torch.ones(3, 2)).shape == (3, 2)
    with NewDisposeScope():
        parametrize.remove_parametrizations(model, "weight")
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_what_was_attached_by_name_goes_with_the_block_whoever_holds_it():
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        attach_to_scope(module)
    assert is_disposed(module.running_mean)
    assert is_disposed(module.weight)


def test_a_plain_attribute_and_the_state_of_a_module_that_has_died_are_the_blocks():
    module, dying = nn.Module(), nn.BatchNorm1d(2)
    with NewDisposeScope():
        module.cache = torch.ones(2)
        mean = write_past(dying)
        del dying
        gc.collect()
    assert is_disposed(mean)
    with pytest.raises(DisposedTensorError):
        module.cache + 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "reparametrize",
    [
        lambda module: prune.random_unstructured(module, "weight", amount=1),
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
    ],
    ids=["prune", "spectral_norm", "weight_norm"],
)
def test_the_weight_that_a_reparametrization_computes_is_the_modules(reparametrize):
    module = nn.Linear(2, 2)
    with NewDisposeScope():
        reparametrize(module)
    assert not is_disposed(module.weight)
    with NewDisposeScope():
        module(torch.ones(1, 2))
    assert not is_disposed(module.weight)


@pytest.mark.slow
def test_older_modules_are_known_and_a_compiled_function_that_makes_one_breaks_no_graph():
    program = """
import torch
from torch import nn
norm = nn.BatchNorm1d(2)
optimizer = torch.optim.SGD(norm.parameters(), momentum=0.9)
from tenure import NewDisposeScope, is_disposed
with NewDisposeScope():
    norm._buffers["running_mean"] = torch.zeros(2)
    optimizer.state[norm.weight]["momentum_buffer"] = torch.zeros(2)
assert not is_disposed(norm.running_mean)
assert not is_disposed(optimizer.state[norm.weight]["momentum_buffer"])
compiled = torch.compile(lambda x: nn.ReLU()(x) + 1, backend="eager", fullgraph=True)
with NewDisposeScope() as scope:
    assert scope.detach(compiled(torch.ones(2))).tolist() == [2, 2]
"""
    done = run_program(program, has_tenure=False)
    assert done.returncode == 0, done.stderr
