"""State that a module or an optimizer holds when a block ends is theirs, however it came there."""

import copy
import gc
import io
import tracemalloc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

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


def checkpoint_of(thing: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    "cls", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.ASGD]
)
def test_optimizer_state_loaded_in_a_block_is_the_optimizers(cls):
    _, trained = trained_optimizer(cls)
    model = nn.Linear(2, 2)
    optimizer = cls(model.parameters())  # it has never stepped, so no hook of torch has told of it
    with NewDisposeScope():
        loaded = torch.load(checkpoint_of(trained.state_dict()), weights_only=False)
        optimizer.load_state_dict(loaded)
    train(model, optimizer)


def test_a_bad_step_is_rolled_back_in_a_block():
    model, optimizer = trained_optimizer()
    good = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    for _ in range(2):
        with NewDisposeScope():
            weights, state = copy.deepcopy(good)
            train(model, optimizer)
            model.load_state_dict(weights, assign=True)
            optimizer.load_state_dict(state)
    assert torch.equal(model.weight, good[0]["weight"])
    train(model, optimizer)


def test_state_written_into_an_optimizer_in_a_block_is_the_optimizers():
    model, optimizer = trained_optimizer()
    with NewDisposeScope():
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 2)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    train(model, optimizer)


def test_a_buffer_written_past_the_module_is_the_modules():
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        module._buffers["running_mean"] = torch.zeros(2)
    assert module(torch.ones(3, 2)).shape == (3, 2)


def test_the_buffers_of_a_module_unpickled_in_a_block_are_its_own():
    with NewDisposeScope():
        module = torch.load(checkpoint_of(nn.BatchNorm1d(2)), weights_only=False)
    assert module(torch.ones(3, 2)).shape == (3, 2)


def test_a_copied_optimizer_and_a_changed_parametrization_are_whole():
    model, optimizer = trained_optimizer()
    with NewDisposeScope():
        copied = copy.deepcopy(optimizer)
        nn.utils.parametrizations.orthogonal(model)
    copied.step()
    with NewDisposeScope():
        nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_the_copy_of_a_module_holds_what_is_written_into_it():
    module = copy.deepcopy(nn.BatchNorm1d(2))
    with NewDisposeScope():
        module._buffers["running_mean"] = torch.zeros(2)
    assert not is_disposed(module.running_mean)


def test_disposing_everything_in_a_block_spares_what_a_module_holds():
    module = nn.BatchNorm1d(2)
    with NewDisposeScope() as scope:
        module._buffers["running_mean"] = torch.zeros(2)
        mine = torch.ones(2)
        scope.dispose_everything()
        assert is_disposed(mine)
        assert owner_of(module.running_mean) is None
    assert not is_disposed(module.running_mean)


def test_state_of_a_module_is_no_leak_and_is_counted_as_detached():
    module = nn.BatchNorm1d(2)
    statistics().reset()
    with NewDisposeScope(policy="report") as scope:
        module._buffers["running_mean"] = torch.zeros(2)
    assert len(scope.leaks) == 0
    assert statistics().detached_from_scope == 1


def test_what_was_attached_by_name_goes_with_the_block_whoever_holds_it():
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        attach_to_scope(module)
    assert is_disposed(module.running_mean)
    assert is_disposed(module.weight)


def test_a_plain_attribute_of_a_module_is_the_blocks():
    module = nn.Module()
    with NewDisposeScope():
        module.cache = torch.ones(2)
    with pytest.raises(DisposedTensorError):
        module.cache + 1


def test_state_of_a_module_that_has_died_is_the_blocks():
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        module._buffers["running_mean"] = mean = torch.zeros(2)
        del module
        gc.collect()
    assert is_disposed(mean)


def test_state_of_an_optimizer_is_found_however_deep_it_is_nested():
    model, optimizer = trained_optimizer()
    nested = optimizer.state[model.weight]["preconditioner"] = {}
    nested["itself"] = nested  # a cycle must not keep the search busy
    with NewDisposeScope():
        nested["blocks"] = [{"factors": ([torch.ones(2)],)}]
    assert not is_disposed(nested["blocks"][0]["factors"][0][0])


def test_a_module_that_refuses_to_be_asked_for_its_class_keeps_its_state():
    class Shy(nn.BatchNorm1d):
        def __getattribute__(self, name):
            if name == "__class__":
                raise RuntimeError("mind your own business")
            return super().__getattribute__(name)

    with NewDisposeScope():
        module = Shy(2)
        module._buffers["running_mean"] = torch.zeros(2)
    assert not is_disposed(module.running_mean)


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


def test_many_modules_leave_no_more_than_the_living_behind():
    with NewDisposeScope():
        survivor = torch.ones(2)
    assert is_disposed(survivor)
    nn.ReLU()
    tracemalloc.start()
    try:
        for _ in range(2000):
            nn.ReLU()
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # an entry for each would take 200 kB
    assert grown_bytes < 50_000


@pytest.mark.slow
def test_modules_and_optimizers_older_than_the_first_scope_are_known():
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
"""
    done = run_program(program, has_tenure=False)
    assert done.returncode == 0, done.stderr


def test_the_signature_of_a_module_stays():
    import inspect

    assert "bias" in inspect.signature(nn.Linear).parameters
    assert list(inspect.signature(nn.Module.__init__).parameters) == ["self", "args", "kwargs"]


@pytest.mark.slow
@pytest.mark.parametrize("dynamo_first", [True, False])
def test_a_module_made_in_a_compiled_function_breaks_no_graph(dynamo_first):
    program = f"""
import torch
from torch import nn
if {dynamo_first}:
    import torch._dynamo
from tenure import NewDisposeScope
with NewDisposeScope():
    survivor = torch.ones(2)
compiled = torch.compile(lambda x: nn.ReLU()(x) + 1, backend="eager", fullgraph=True)
with NewDisposeScope() as scope:
    assert scope.detach(compiled(torch.ones(2))).tolist() == [2, 2]
"""
    done = run_program(program, has_tenure=False)
    assert done.returncode == 0, done.stderr


def test_what_a_scaler_makes_under_the_mode_of_a_device_is_the_scalers():
    scaler = torch.amp.GradScaler("cpu", 64.0)
    with NewDisposeScope(), torch.device("cpu"):
        assert scaler.scale(torch.ones(1)).tolist() == [64]
    assert scaler.scale(torch.ones(1)).tolist() == [64]


def let_one_go() -> None:
    with NewDisposeScope():
        survivor = torch.ones(2)
    assert is_disposed(survivor)


def make_modules_until_the_class_is_as_before() -> None:
    let_one_go()
    wrapped, n_made = nn.Module.__init__, 0
    # how many depends on what this process has done
    while nn.Module.__init__ is wrapped and n_made < 1_000_000:
        nn.Identity()
        n_made += 1
    assert nn.Module.__init__ is wrapped.__wrapped__


def test_the_classes_are_as_before_when_no_scope_has_had_survivors_for_a_while():
    make_modules_until_the_class_is_as_before()
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        module._buffers["running_mean"] = torch.zeros(2)
    assert not is_disposed(module.running_mean)


def test_modules_are_known_when_another_patcher_has_restored_what_it_saw():
    make_modules_until_the_class_is_as_before()
    before = nn.Module.__init__
    let_one_go()
    nn.Module.__init__ = before
    module = nn.BatchNorm1d(2)
    with NewDisposeScope():
        module._buffers["running_mean"] = torch.zeros(2)
    assert not is_disposed(module.running_mean)


class Momentum(torch.optim.Optimizer):
    """Makes its state in code of the user's own."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)


def test_no_scope_owns_the_state_that_a_step_has_made():
    parameter = nn.Parameter(torch.ones(2))
    with NewDisposeScope() as scope:
        optimizer = Momentum([parameter])
        optimizer.step()
        assert optimizer.state[parameter]["momentum"] not in scope
