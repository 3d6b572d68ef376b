"""What ran when memory was short, as text and numbers: no frame and no object is kept.

An error that a function of torch raised is seen above that function: what ran inside is in the
error's traceback, what ran around it is on the stack.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._callers import line_and_function, line_in
from tenure._heap import (
    Graphs,
    instance_attributes,
    is_kind,
    read,
    read_locals,
    type_name,
    walk_nodes,
)
from tenure._storages import storage_bytes
from tenure._torch.autograd import sequence_number

from .._owners import saved_storages
from ._program import Program, is_library
from ._watch import Notes

_LOSSES = frozenset(
    {"cross_entropy", "log_softmax", "nll_loss", "softmax", "fixed_cross_entropy", "kl_div"}
)
_BUILDS = frozenset(
    {"from_pretrained", "from_config", "__init__", "_apply", "to", "cuda", "cpu"}
    | {"load_state_dict", "reset_parameters", "to_empty"}
)
_STEPS = frozenset({"step", "_init_group", "profile_hook_step", "wrapper"})
# Around an operation of a training step there are tens of frames; a recursion may have thousands.
_MOST_FRAMES, _MOST_ITEMS, _MOST_VARIABLES = 400, 16, 64
_PREFIX = re.compile(r"\A(?:numpy array |a view in )?(?:[\w.<>]+\.<locals>\.|__main__\.)")


@dataclass(frozen=True, slots=True)
class GraphVariable:
    """A variable or attribute that a graph of autograd hangs on.

    Attributes:
        name: as its function says it, an attribute with the class of its object.
        n_bytes: bytes that the graph has saved.
        first: the number of the oldest node of the graph.
        last: the number of the newest.
        n_steps: how many backward passes began within the graph, which goes on after them.
        is_past: nothing reads the variable again before it is bound anew.
        is_carried: a statement reads it and binds it anew: it goes on from step to step.
        is_scalar: it is a single number.
    """

    name: str
    n_bytes: int
    first: int
    last: int
    n_steps: int
    is_past: bool
    is_carried: bool
    is_scalar: bool


@dataclass(slots=True)
class Scene:
    """The moment of the error; each attribute is as it is here until it has been looked at.

    Attributes:
        site: the user's line, as ``train.py:41 in loss_of``; empty where no frame is the user's.
        raised_in: the functions in the error's own traceback.
        is_recording: autograd recorded what ran.
        is_backward: a backward pass ran.
        is_loss: a function of a loss over classes ran.
        calls_backward: the code of a running function names backward() or grad().
        autocast_dtype: what autocast casts to and remembers; empty where it remembers nothing.
        module: the innermost module of the program whose forward ran, with its dotted name in the
            outermost; empty where none ran.
        model: the outermost module whose forward ran.
        batch_size: the length of its first argument; 0 where nothing tells.
        has_own_graph: the graphs in its forward lead to no parameters but its own.
        all_in_eval: every module whose forward ran is in eval mode.
        out_features: of the innermost module whose forward ran; 0 where it is not linear.
        building: the class of the outermost module that was being made, loaded or moved.
        building_bytes: its parameters and buffers, on all devices.
        optimizer: the class of an optimizer whose step ran; empty otherwise.
        optimizer_name: the variable or attribute that the optimizer is; can be empty.
        optimizer_bytes: the parameters that it steps.
        state_bytes: its state.
        is_first_step: it has no state yet for some of its parameters.
        has_momentum: a setting of it that is called momentum is not 0.
        containers: variables that are containers: "list" in a function that has a model, and
            "data" in another; "dict"; "default" of an argument; "bounded" if it grows no more.
        program: the source of the program; None where it could not be read.
        variables: what holds graphs of autograd, the largest graph first.
    """

    site: str = ""
    raised_in: frozenset[str] = frozenset()
    is_recording: bool = False
    is_backward: bool = False
    is_loss: bool = False
    calls_backward: bool = True
    autocast_dtype: str = ""
    module: str = ""
    model: weakref.ref[nn.Module] | None = None
    batch_size: int = 0
    has_own_graph: bool = False
    all_in_eval: bool = False
    out_features: int = 0
    building: str = ""
    building_bytes: int = 0
    optimizer: str = ""
    optimizer_name: str = ""
    optimizer_bytes: int = 0
    state_bytes: int = 0
    is_first_step: bool = False
    has_momentum: bool = False
    containers: dict[str, str] = field(default_factory=dict)
    program: Program | None = None
    variables: list[GraphVariable] = field(default_factory=list)

    @property
    def is_forward(self) -> bool:
        """Whether the forward of a module ran."""
        return self.model is not None

    def is_fixed(self, name: str) -> bool:
        """Whether the program adds nothing to a container."""
        return self.program is not None and self.program.is_fixed(name)

    def look(self, error: BaseException, frame: FrameType | None, notes: Notes) -> None:
        """Look at what ran when an error was raised, in its traceback and around it on the stack.

        Of an error that nobody handled there is no frame, and all that ran is in its traceback.
        """
        inside, frames = list(_frames_of(error, None)), list(_frames_of(error, frame))
        own = [each for each in frames if not is_library(each)]
        self.site = _site_of(own[0]) if own else ""
        self.raised_in = frozenset(each.f_code.co_qualname for each in inside)
        self.is_recording = torch.is_grad_enabled()
        names = {each.f_code.co_name for each in frames}
        self.is_backward = "_engine_run_backward" in names
        self.is_loss = not names.isdisjoint(_LOSSES)
        called_names = {name for each in frames for name in each.f_code.co_names}
        self.calls_backward = not called_names.isdisjoint(("backward", "grad"))
        if torch.is_autocast_cache_enabled():
            on = (each for each in ("cuda", "cpu") if torch.is_autocast_enabled(each))
            dtypes = (str(torch.get_autocast_dtype(each)) for each in on)
            self.autocast_dtype = next(dtypes, "").removeprefix("torch.")
        self._look_at_objects(frames, own)
        # code of any kind is read, and graphs of any size: if that fails, the rest is still known
        with suppress(Exception):
            self.program = Program(own)
        for each in own:
            self._add_containers(each)
        with suppress(Exception):
            found = (v for each in own for v in self._graph_variables(each, notes))
            self.variables = sorted(found, key=lambda variable: -variable.n_bytes)

    # --- modules and optimizers

    def _look_at_objects(self, frames: list[FrameType], own: list[FrameType]) -> None:
        called: list[tuple[Any, FrameType]] = []
        for frame in frames:
            name = frame.f_code.co_name
            subject: Any = _self_of(frame)
            if is_kind(type(subject), Optimizer):
                if not self.optimizer and any(each.f_code.co_name in _STEPS for each in frames):
                    self._look_at_optimizer(subject, own)
            elif is_kind(type(subject), nn.Module) and name == "forward":
                called.append((subject, frame))
            # A layer that is made within a forward is lazily made there: that is no building.
            elif is_kind(type(subject), nn.Module) and name in _BUILDS and not called:
                self.building = type_name(type(subject))
                self.building_bytes = max(self.building_bytes, _size_of(subject))
        if called:
            self._look_at_forward(called)

    def _look_at_forward(self, called: list[tuple[Any, FrameType]]) -> None:
        model, frame = called[-1]
        modules = [module for module, _ in called]
        own = [each for each in modules if not type(each).__module__.startswith("torch.")]
        innermost = (own or modules)[0]
        path = next((name for name, each in model.named_modules() if each is innermost), "")
        self.module = ".".join(filter(None, (type_name(type(model)), path)))
        self.model = weakref.ref(model)
        self.all_in_eval = not any(module.training for module in modules)
        self.out_features = int(getattr(modules[0], "out_features", 0) or 0)
        held: list[Any] = [t for _, t in read_locals(frame) if is_kind(type(t), Tensor)]
        self.batch_size = next((t.shape[0] for t in held if t.dim()), 0)
        nodes = [node for t in held if (node := read(t, "grad_fn")) is not None]
        leaves = (getattr(node, "variable", None) for node in walk_nodes(nodes, {}))
        parameters = {id(p) for p in model.parameters()}
        self.has_own_graph = all(id(each) in parameters for each in leaves if each is not None)

    def _look_at_optimizer(self, optimizer: Any, own: list[FrameType]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        stepped = [optimizer.state.get(p) for p in parameters if read(p, "grad") is not None]
        self.optimizer = type_name(type(optimizer))
        self.optimizer_name = _name_in(own, optimizer)
        self.optimizer_bytes = sum(storage_bytes(p) or 0 for p in parameters)
        self.state_bytes = state_bytes_of(optimizer)
        self.is_first_step = not all(any(_large_in(state)) for state in stepped)
        self.has_momentum = any(group.get("momentum") for group in optimizer.param_groups)

    # --- variables

    def _add_containers(self, frame: FrameType) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        is_module = frame.f_locals is frame.f_globals
        found = [] if is_module else [*read_locals(frame)]
        named = {name: frame.f_globals.get(name) for name in code.co_names}
        has_model = any(_is_model(value) for value in (*named.values(), *dict(found).values()))
        defaults = self.program.defaults if self.program is not None else ()
        for name, value in found:
            if kind := _kind_of(value, has_model):
                is_default = f"{code.co_name}.{name}" in defaults
                self.containers.setdefault(name, "default" if is_default else kind)
        for name, value in [*frame.f_globals.items()]:
            if kind := _kind_of(value, has_model):
                self.containers.setdefault(short(f"{module}.{name}"), kind)

    def _graph_variables(self, frame: FrameType, notes: Notes) -> Iterator[GraphVariable]:
        program = self.program
        for name, t in _tensors_of(frame):
            node = read(t, "grad_fn")
            if node is None:
                continue
            plain = name.removesuffix("[…]").rpartition(".")[2]
            numbers = [
                n for each in walk_nodes([node], {}) if (n := sequence_number(each)) is not None
            ]
            first, last = min(numbers, default=0), max(numbers, default=0)
            saved = [each.record for each in saved_storages(Graphs([node])).values()]
            yield GraphVariable(
                name,
                sum(record.n_bytes for record in saved if not record.is_leaf),
                first,
                last,
                sum(first <= mark < last for mark in notes.marks),
                program is not None and "." not in name and program.is_past(frame, plain),
                program is not None and plain in program.carried,
                t.numel() == 1,
            )


def short(name: str) -> str:
    """A name without the function or the module of the program that it is in."""
    return _PREFIX.sub("", name)


def state_bytes_of(optimizer: Any) -> int:
    """What the tensors of an optimizer's state take."""
    states = [*getattr(optimizer, "state", {}).values()]
    return sum(storage_bytes(t) or 0 for state in states for t in _tensors_in_state(state))


def _frames_of(error: BaseException, frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the traceback, innermost first, and those around the frame that saw it."""
    inside: list[FrameType] = []
    step = error.__traceback__
    while step is not None and len(inside) < _MOST_FRAMES:
        inside.append(step.tb_frame)
        step = step.tb_next
    yield from reversed(inside)
    for _ in range(_MOST_FRAMES):
        # the frame that saw it is in the traceback as well
        if frame is not None and frame not in inside:
            yield frame
        frame = None if frame is None else frame.f_back


def _site_of(frame: FrameType) -> str:
    code, line = frame.f_code, frame.f_lineno
    if code.co_name == "<module>":
        return line_in(code.co_filename, line)
    return line_and_function(code, line)


def _self_of(frame: FrameType) -> object:
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    return next((value for name, value in read_locals(frame) if name == "self"), None)


def _name_in(own: list[FrameType], found: object) -> str:
    """The variable of the program that an object is, or the attribute of a ``self``."""
    for frame in own:
        for name, value in _variables_of(frame):
            if value is found:
                return name
    return ""


def _variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The variables of a frame, and in the place of ``self`` its attributes."""
    for name, value in read_locals(frame):
        if name == "self":
            label = type_name(type(value))
            attributes = [*instance_attributes(value).items()]
            yield from ((f"{label}.{key}", inner) for key, inner in attributes)
        else:
            yield name, value


def _tensors_of(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    for name, value in _variables_of(frame):
        if is_kind(type(value), Tensor):
            yield name, value
            continue
        items = list(value.values()) if type(value) is dict else value
        items = [*items][-_MOST_ITEMS:] if type(items) in (list, tuple, deque) else []
        for item in items:
            # as the state of an LSTM for each of its layers
            for t in item if type(item) is tuple else (item,):
                if is_kind(type(t), Tensor):
                    yield f"{name}[…]", t


def _is_model(value: Any) -> bool:
    """Whether a variable is a module, or an object that has one."""
    inside = () if type(value) is ModuleType else instance_attributes(value).values()
    return any(is_kind(type(each), nn.Module) for each in (value, *inside))


def _kind_of(value: Any, has_model: bool) -> str:
    kind = type(value)
    # by identity: a metaclass may define __eq__
    if kind is deque and value.maxlen is not None:
        return "bounded"
    if kind is list or kind is set or kind is deque:
        return "list" if has_model else "data"
    return "dict" if kind is dict else ""


def _tensors_in_state(state: Any) -> Iterator[Tensor]:
    for value in state.values() if isinstance(state, dict) else ():
        yield from (
            t for t in (value if type(value) is list else (value,)) if isinstance(t, Tensor)
        )


def _large_in(state: Any) -> Iterator[bool]:
    return (t.numel() > 1 for t in _tensors_in_state(state))


def _size_of(module: nn.Module) -> int:
    try:
        tensors = [*module.parameters(), *module.buffers()]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(storage_bytes(t) or t.numel() * t.element_size() for t in tensors)
