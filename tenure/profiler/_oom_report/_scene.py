"""What ran when memory was short, as text and numbers: no frame and no object is kept.

An error that a function of torch raised is seen above that function: what ran inside is in the
error's traceback, what ran around it is on the stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._callers import line_and_function, line_in
from tenure._heap import instance_attributes, is_kind, read, read_locals, type_name
from tenure._storages import storage_bytes

from ._notes import Notes
from ._variables import (
    GraphVariable,
    filled_elsewhere,
    graph_variables,
    is_library,
    names_of_program,
)

_LOSSES = frozenset(
    {"cross_entropy", "log_softmax", "nll_loss", "softmax", "fixed_cross_entropy", "kl_div"}
)
_MOVES = frozenset(
    {"_apply", "to", "cuda", "cpu", "load_state_dict", "reset_parameters", "to_empty"}
)
_BUILDS = frozenset({"from_pretrained", "from_config", "__init__", *_MOVES})
# Around an operation of a training step there are tens of frames; a recursion may have thousands.
_MOST = 400


@dataclass(frozen=True, slots=True)
class Scene:
    """The moment of the error.

    Attributes:
        site: the user's line, as ``train.py:41 in loss_of``; empty where no frame is the user's.
        is_training: autograd recorded what ran.
        is_backward: a backward pass ran.
        is_forward: the forward of a module ran.
        is_loss: a function of a loss over classes ran.
        is_building: a module was being made, loaded or moved.
        out_features: of the innermost module whose forward ran; 0 where it is not linear.
        optimizer: the class of an optimizer whose step ran; empty otherwise.
        is_first_step: it has no state yet for some of its parameters.
        optimizer_bytes: the parameters that it steps.
        building_bytes: the parameters and buffers of the module that is being made, loaded or
            moved, on all devices.
        all_in_eval: every module whose forward ran is in eval mode.
        raised_in: the functions in the error's own traceback, as holders' names tell them.
        containers: the containers that variables of the program are, by name: "list", "dict", or
            "bounded" for one that grows no more.
        fixed: names of variables and attributes that the program adds nothing to.
        filled_elsewhere: variables of containers that the program adds to under another name, as a
            hook does.
        module: the innermost module of the program whose forward ran, with its dotted name in the
            outermost; empty where none ran.
        building: the class of the outermost module that was being made, loaded or moved.
        optimizer_name: the variable or attribute that the optimizer is; can be empty.
        state_bytes: the state of that optimizer.
        variables: what holds graphs of autograd, the largest graph first.
        autocast_dtype: what autocast casts to and remembers; empty where it remembers nothing.
        calls_backward: whether the code of a running function names backward() or grad().
        retained_at: the line of the last ``backward(retain_graph=True)``; can be empty.
        created_at: the same of ``create_graph=True``.
    """

    site: str = ""
    is_training: bool = False
    is_backward: bool = False
    is_forward: bool = False
    is_loss: bool = False
    is_building: bool = False
    out_features: int = 0
    optimizer: str = ""
    is_first_step: bool = False
    optimizer_bytes: int = 0
    building_bytes: int = 0
    all_in_eval: bool = False
    raised_in: frozenset[str] = frozenset()
    containers: dict[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    filled_elsewhere: frozenset[str] = frozenset()
    module: str = ""
    building: str = ""
    optimizer_name: str = ""
    state_bytes: int = 0
    variables: tuple[GraphVariable, ...] = ()
    autocast_dtype: str = ""
    calls_backward: bool = True
    retained_at: str = ""
    created_at: str = ""


def scene_of(error: BaseException, frame: FrameType | None, notes: Notes) -> Scene:
    """What ran when an error was raised.

    Args:
        error: the error; its traceback leads inwards from the frame that saw it.
        frame: the frame that saw it, from which the stack leads outwards; None where nobody
            handled it, and all that ran is in its traceback.
        notes: what was noted before.
    """
    inside = _inside(error)
    # the frame that saw it is in the traceback as well
    frames = [*inside, *(each for each in _outside(frame) if each not in inside)]
    scene = _of_frames(frames, frozenset(each.f_code.co_qualname for each in inside))
    scene = replace(scene, retained_at=notes.retained_at, created_at=notes.created_at)
    own = [each for each in frames if not is_library(each)]
    # code of any kind is read, and graphs of any size: if that fails, the rest is still reported
    with suppress(Exception):
        fixed, grown = names_of_program(own)
        filled = filled_elsewhere(own, fixed, grown)
        scene = replace(scene, fixed=fixed - filled, filled_elsewhere=filled)
        scene = replace(scene, variables=tuple(graph_variables(own, notes.marks)))
    return scene


def _inside(error: BaseException) -> list[FrameType]:
    """The frames of the traceback, innermost first."""
    found: list[FrameType] = []
    step = error.__traceback__
    while step is not None and len(found) < _MOST:
        found.append(step.tb_frame)
        step = step.tb_next
    return found[::-1]


def _outside(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _of_frames(frames: list[FrameType], raised_in: frozenset[str]) -> Scene:
    facts: dict[str, Any] = {"site": _site_in(frames), "is_training": torch.is_grad_enabled()}
    facts.update(raised_in=raised_in, containers=_containers_in(frames))
    names = {frame.f_code.co_name for frame in frames}
    facts["is_backward"] = "_engine_run_backward" in names
    called_names = {name for frame in frames for name in frame.f_code.co_names}
    facts["calls_backward"] = not called_names.isdisjoint(("backward", "grad"))
    facts["is_loss"] = bool(names & _LOSSES)
    called: list[nn.Module] = []
    for frame in frames:
        subject = _self_of(frame)
        if is_kind(type(subject), Optimizer) and not facts.get("optimizer"):
            facts.update(_of_optimizer(subject, frames))
        elif is_kind(type(subject), nn.Module):
            _add_module(facts, frame.f_code.co_name, subject, called)
    facts["all_in_eval"] = bool(called) and not any(module.training for module in called)
    if called:
        facts["module"] = _path_of(called)
    if torch.is_autocast_cache_enabled():
        facts["autocast_dtype"] = _autocast_dtype()
    return Scene(**facts)


def _path_of(called: list[nn.Module]) -> str:
    """The dotted name of the innermost module that is no layer of torch; else of the innermost."""
    own = [each for each in called if not type(each).__module__.startswith("torch.")]
    outermost, innermost = called[-1], (own or called)[0]
    path = next((name for name, each in outermost.named_modules() if each is innermost), "")
    return ".".join(filter(None, (type_name(type(outermost)), path)))


def _autocast_dtype() -> str:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def _add_module(facts: dict[str, Any], name: str, module: Any, called: list[nn.Module]) -> None:
    if name == "forward":
        called.append(module)
        if not facts.get("is_forward"):
            facts["out_features"] = int(getattr(module, "out_features", 0) or 0)
        facts["is_forward"] = True
    # A layer that is made within a forward is lazily made there: that is no building of a model.
    elif name in _BUILDS and not facts.get("is_forward"):
        facts["is_building"] = True
        facts["building"] = type_name(type(module))
        facts["building_bytes"] = max(facts.get("building_bytes", 0), _bytes_of(module))


def _containers_in(frames: list[FrameType]) -> dict[str, str]:
    found: dict[str, str] = {}
    for frame in frames:
        if not is_library(frame):
            prefix = f"{frame.f_code.co_qualname}.<locals>"
            if frame.f_locals is frame.f_globals:
                prefix = str(frame.f_globals.get("__name__"))
            for name, value in [*read_locals(frame)]:
                if kind := _kind_of(value):
                    found[f"{prefix}.{name}"] = kind
            module = frame.f_globals.get("__name__")
            for name, value in [*frame.f_globals.items()]:
                if kind := _kind_of(value):
                    found.setdefault(f"{module}.{name}", kind)
    return found


def _kind_of(value: object) -> str:
    kind = type(value)
    # by identity: a metaclass may define __eq__
    if kind is deque:
        return "list" if value.maxlen is None else "bounded"  # type: ignore[attr-defined]
    return "list" if kind is list or kind is set else "dict" if kind is dict else ""


def _self_of(frame: FrameType) -> object:
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    return next((value for name, value in read_locals(frame) if name == "self"), None)


def _of_optimizer(optimizer: Any, frames: list[FrameType]) -> dict[str, Any]:
    steps = ("step", "_init_group", "profile_hook_step", "wrapper")
    if not any(frame.f_code.co_name in steps for frame in frames):
        return {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = [p for p in parameters if read(p, "grad") is not None]
    return {
        "optimizer": type_name(type(optimizer)),
        "is_first_step": any(not _has_state(optimizer.state.get(p)) for p in stepped),
        "optimizer_bytes": sum(storage_bytes(p) or 0 for p in parameters),
        "optimizer_name": _name_in(frames, optimizer),
        "state_bytes": state_bytes_of(optimizer),
    }


def state_bytes_of(optimizer: Any) -> int:
    """What the tensors of an optimizer's state take."""
    states = [*getattr(optimizer, "state", {}).values()]
    found = (value for state in states if isinstance(state, dict) for value in state.values())
    items = (t for value in found for t in (value if type(value) is list else (value,)))
    return sum(storage_bytes(t) or 0 for t in items if isinstance(t, Tensor))


def _name_in(frames: list[FrameType], found: object) -> str:
    """The variable of the program that an object is, or the attribute of a ``self``."""
    for frame in frames:
        if not is_library(frame):
            for name, value in read_locals(frame):
                if value is found and name != "self":
                    return name
                attributes = instance_attributes(value) if name == "self" else {}
                for key, inner in [*attributes.items()]:
                    if inner is found:
                        return f"{type_name(type(value))}.{key}"
    return ""


def _has_state(state: Any) -> bool:
    if not state:
        return False
    return any(isinstance(value, Tensor) and value.numel() > 1 for value in state.values())


def _bytes_of(module: nn.Module) -> int:
    try:
        tensors = [*module.parameters(), *module.buffers()]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(storage_bytes(t) or t.numel() * t.element_size() for t in tensors)


def _site_in(frames: list[FrameType]) -> str:
    user = next((frame for frame in frames if not is_library(frame)), None)
    if user is None:
        return ""
    code, line = user.f_code, user.f_lineno
    if code.co_name == "<module>":
        return line_in(code.co_filename, line)
    return line_and_function(code, line)
