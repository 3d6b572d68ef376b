"""A private name of torch that is gone stops only what needs it, and an error names it."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tenure
from tenure._torch import bound, getter, require

_ROOT = Path(tenure.__file__).parent
_WORKER = Path(__file__).with_name("without_names.py")

# In every pickled module of every program, so torch goes on reading them: a part of its format.
_PICKLED = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}

_PLAIN = ("scope", "retry")
_OF_SCOPES = ("scope", "backward_in_a_scope", "container", "retry", "step")
_OF_STEPS = ("step",)
_OF_LINES = ("lines",)
_OF_BUDGETS = ("budget",)
_OF_PAGES = ("paged",)
_OF_PREDICTIONS = ("prediction",)
# Uses that stop where a name is missing, among ``USES`` of without_names.py; of a name with none
# the stand-in is tried alone. Each is tried together with the plain ones, which go on.
_STOPPED = {
    "torch.Tensor._backward_hooks": ("step", "prediction"),
    "torch.Tensor._indices": ("sparse_in_a_budget",),
    "torch.Tensor._make_wrapper_subclass": (),
    "torch.Tensor._post_accumulate_grad_hooks": ("step", "prediction"),
    "torch.Tensor._use_count": ("holders", "paged"),
    "torch.Tensor._values": ("sparse_in_a_budget",),
    "torch.Tensor._version": ("step", "paged"),
    "torch.UntypedStorage._cdata": ("budget", "lines", "holders", "saved", "paged", "prediction"),
    "torch._C.DisableTorchFunction": (
        "scope",
        "budget",
        "step",
        "lines",
        "holders",
        "paged",
        "prediction",
    ),
    "torch._C.DisableTorchFunctionSubclass": (),
    "torch._C._DisableFuncTorch": _OF_PAGES,
    "torch._C._DisableTorchDispatch": ("saved", "paged"),
    "torch._C._autograd.ProfilerEvent.cpu_memory_usage": _OF_LINES,
    "torch._C._autograd.SavedTensor": ("saved",),
    "torch._C._autograd.SavedTensor.data": ("saved",),
    "torch._C._autograd.SavedTensor.unpack_hook": ("saved",),
    "torch._C._autograd._disable_profiler_legacy": _OF_LINES,
    "torch._C._autograd._enable_profiler_legacy": _OF_LINES,
    "torch._C._autograd._enable_record_function": _OF_LINES,
    "torch._C._autograd._get_sequence_nr": _OF_PREDICTIONS,
    "torch._C._autograd._profiler_enabled": _OF_LINES,
    "torch._C._autograd._record_function_with_args_enter": _OF_LINES,
    "torch._C._autograd._record_function_with_args_exit": _OF_LINES,
    "torch._C._autograd._top_saved_tensors_default_hooks": (),
    "torch._C._autograd._unsafe_set_version_counter": (),
    "torch._C._current_autograd_node": _OF_PREDICTIONS,
    "torch._C._current_graph_task_id": _OF_LINES,
    "torch._C._data_address": (),
    "torch._C._dynamo.eval_frame.set_eval_frame": _OF_STEPS,
    "torch._C._functorch.is_legacy_batchedtensor": (),
    "torch._C._functorch.peek_interpreter_stack": (),
    "torch._C._get_dispatch_stack_at": _OF_BUDGETS,
    "torch._C._get_function_stack_at": _OF_STEPS,
    "torch._C._len_torch_dispatch_stack": _OF_BUDGETS,
    "torch._C._len_torch_function_stack": _OF_SCOPES,
    "torch._C._pop_torch_function_stack": _OF_SCOPES,
    "torch._C._profiler.ProfilerConfig": _OF_LINES,
    "torch._C._profiler.ProfilerState": _OF_LINES,
    "torch._C._profiler._ExperimentalConfig": _OF_LINES,
    "torch._C._push_on_torch_function_stack": _OF_SCOPES,
    "torch._C._select_conv_backend": (),
    "torch._C._storage_Use_Count": ("budget", "holders", "paged"),
    "torch._C._swap_tensor_impl": _OF_PREDICTIONS,
    "torch._C._to_dlpack": _OF_PAGES,
    "torch._lazy_clone": (),
    "torch._subclasses.fake_tensor.DataDependentOutputException": (),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": (),
    "torch._subclasses.fake_tensor.FakeTensor": _OF_PREDICTIONS,
    "torch._subclasses.fake_tensor.FakeTensorMode": _OF_PREDICTIONS,
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": (),
    "torch._subclasses.fake_tensor.unset_fake_temporarily": (),
    "torch.amp.grad_scaler._MultiDeviceReplicator.get": (),
    "torch.autograd.Variable._execution_engine.queue_callback": (),
    "torch.nn.Module._save_to_state_dict": (),
    "torch.nn.modules.batchnorm._BatchNorm": _OF_STEPS,
    "torch.nn.modules.batchnorm._NormBase": (),
    "torch.nn.modules.dropout._DropoutNd": (),
    "torch.nn.modules.instancenorm._InstanceNorm": _OF_STEPS,
    "torch.optim.optimizer.Optimizer._optimizer_step_post_hooks": (),
    "torch.optim.optimizer.Optimizer._optimizer_step_pre_hooks": (),
    "torch.optim.optimizer._foreach_supported_types": _OF_PREDICTIONS,
    "torch.optim.optimizer._get_foreach_kernels_supported_devices": _OF_PREDICTIONS,
    "torch.optim.optimizer._global_optimizer_pre_hooks": (),
    "torch.utils._python_dispatch.TorchDispatchMode": (),
    "torch.utils._python_dispatch._disable_current_modes": (),
    "torch.utils._python_dispatch._pop_mode": (),
    "torch.utils._python_dispatch._push_mode": (),
    "torch.utils._pytree.SUPPORTED_NODES": ("container", "prediction"),
}


def answer_to(wanted):
    done = subprocess.run(
        [sys.executable, _WORKER],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def raised():
    """By missing name, what was raised by use; of no missing name that of ``""``."""
    return answer_to({name: sorted({*uses, *_PLAIN}) for name, uses in _STOPPED.items()})


def test_each_use_works_in_the_torch_that_is_here():
    assert set(answer_to(None)[""].values()) == {None}


@pytest.mark.slow
def test_every_name_that_is_bound_is_tried(raised):
    assert set(raised) - {"", "all"} == set(_STOPPED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_STOPPED))
def test_a_missing_name_stops_what_needs_it_and_nothing_else(raised, name):
    expected = {use: name if use in _STOPPED[name] else None for use in raised[name]}
    assert raised[name] == expected


@pytest.mark.slow
def test_without_any_private_name_every_room_imports_and_says_what_is_missing(raised):
    names = raised["all"]
    assert all(
        error is not None and re.fullmatch(r"torch[\w.]+", error) for error in names.values()
    )


@pytest.mark.parametrize("missing", [bound, getter])
def test_a_missing_name_is_told_with_what_is_lost_and_what_to_do(missing):
    found = missing("torch._C._gone", "this test")
    message = (
        f"torch {torch.__version__} has no torch._C._gone, a private name that tenure needs for "
        "this test. Only that is lost. Install a torch that this tenure is tested with (see "
        "constraints.txt), or update tenure."
    )
    with pytest.raises(tenure.MissingTorchNameError, match=f"^{re.escape(message)}$") as caught:
        found(torch.ones(1))
    assert caught.value.name == "torch._C._gone"


@pytest.mark.parametrize(
    "use",
    [
        lambda gone: gone.attribute,
        lambda gone: isinstance(nn.Linear(1, 1), gone),
        lambda gone: isinstance(nn.Linear(1, 1), gone | nn.RReLU),
        lambda gone: issubclass(nn.Linear, gone),
        lambda gone: type("Derived", (gone,), {})(),
        lambda gone: require(len, gone),
    ],
)
def test_whatever_is_asked_of_a_missing_name_raises(use):
    gone = bound("torch._C._gone", "this test")
    with pytest.raises(tenure.MissingTorchNameError, match=r"has no torch\._C\._gone,"):
        use(gone)


def _private_attributes():
    """What torch's own objects have under a name of theirs that starts with an underscore."""
    leaf = torch.ones(1, requires_grad=True)
    objects = (
        leaf, leaf.untyped_storage(), nn.BatchNorm1d(1), torch.Generator(), (leaf * 2).grad_fn,
        torch.optim.SGD([leaf], lr=1.0), torch.ops.aten.add.Tensor,
    )  # fmt: skip
    names = {name for found in objects for name in dir(found) if re.match("_[a-z]", name)}
    return names - _PICKLED


_ATTRIBUTES = _private_attributes()


def _private_names(path):
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if re.fullmatch(r"_?torch(\.\w+)+", text):
                yield text.removeprefix("_")
            elif node.attr in _ATTRIBUTES and not of_ours:
                yield f"torch.{node.attr}"


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(_ROOT.rglob("*.py")) if path.relative_to(_ROOT).parts[0] != "_torch"],
    ids=lambda path: str(path.relative_to(_ROOT)),
)
def test_private_names_of_torch_are_said_in_their_package_alone(path):
    assert [name for name in _private_names(path) if re.match(r"torch\b.*\._[a-zA-Z]", name)] == []


def test_the_reader_of_names_sees_each_way_to_say_one(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        inspect.cleandoc(
            """
            import torch._dynamo
            from torch._C import thing
            from torch.nn.modules.batchnorm import _BatchNorm
            torch._C._thing(storage._cdata)
            self._version, torch.__version__, module._buffers
            """
        )
    )
    private = {name for name in _private_names(path) if re.match(r"torch\b.*\._[a-zA-Z]", name)}
    assert private == {
        "torch._dynamo", "torch._C.thing", "torch.nn.modules.batchnorm._BatchNorm",
        "torch._C._thing", "torch._C", "torch._cdata",
    }  # fmt: skip
