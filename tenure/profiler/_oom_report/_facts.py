"""What is known when memory runs out: the error, what ran, the tensors, the allocator, the host.

Each part is asked for by itself, and one that fails is missing: memory is short while this runs.
Only text, numbers and weak references are kept: nothing here holds what it tells of.
"""

from __future__ import annotations

import dis
import re
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure import _host_memory
from tenure._account import is_counted
from tenure._callers import line_and_function
from tenure._heap import (
    Graphs,
    instance_attributes,
    is_kind,
    read,
    read_locals,
    type_name,
    walk_nodes,
)
from tenure._oom import OomInfo, allowed_bytes_in, free_bytes_in, limit_bytes_in, own_bytes_in
from tenure._text import dtype_name, format_bytes
from tenure._torch.autograd import OF_A_LEAF, node_number

from .._allocator import allocator_bytes
from .._owners import (
    BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHERS,
    PARAMETERS,
    SAVED,
    StorageEntry,
    TensorRow,
    saved_storages,
    take_census,
)
from ._program import ProgramFiles, is_library
from ._watch import Watch

# in the text of its errors
_OF_BUDGET = "memory_budget has a limit"
BACKWARD = "_engine_run_backward"
_BUILDS = frozenset(
    {"from_pretrained", "from_config", "__init__", "_apply", "to", "cuda", "cpu"}
    | {"load_state_dict", "reset_parameters", "to_empty"}
)
# Around an operation of a training step there are tens of frames; a recursion may have thousands.
_MOST_FRAMES, _MOST_ITEMS = 400, 16
_PREFIX = re.compile(r"\A(?:numpy array |a view in )?(?:[\w.<>]+\.<locals>\.|__main__\.)")
_VERB = re.compile(r"(LOAD|STORE)_(?:FAST|NAME)")


class Carried(NamedTuple):
    """A variable with a graph that a statement reads and binds anew, from step to step.

    Attributes:
        name: as its function says it, an attribute with the class of its object.
        n_bytes: bytes that the graph has saved.
        n_steps: how many backward passes ran before the end of the graph, which goes on after them.
        is_scalar: it is a single number.
    """

    name: str
    n_bytes: int
    n_steps: int
    is_scalar: bool


@dataclass(slots=True)
class Facts:
    """All that a cause is judged by; each part is as it is here until it has been looked at.

    Attributes:
        info: the error.
        watch: what the program did before.
        began_bytes: what the process had of the host's memory when recording began.
        device: where memory ran out, as tensors spell it.
        entries: the storages there.
        total_bytes: the memory of the device, or the limit on it.
        free_bytes: what of it was free.
        others_bytes: what of it other processes have.
        fragmentation: as `OomReport` has it.
        host: as `OomReport` has it.
        notes: what could not be seen.
        site: the user's line, as ``train.py:41 in loss_of``; empty where no frame is the user's.
        raised_in: the functions in the error's own traceback.
        is_recording: autograd recorded what ran.
        names: the functions that ran.
        called_names: all that their code names.
        autocast_dtype: what autocast casts to and remembers; empty if it remembers nothing.
        module: the innermost module of the program whose forward ran, with its dotted name in the
            outermost; empty where none ran.
        model: the outermost module whose forward ran.
        batch_size: the length of its first argument; 0 where nothing tells.
        has_own_graph: the graphs in its forward lead to no parameters but its own.
        all_in_eval: every module whose forward ran is in eval mode.
        out_features: of the innermost module whose forward ran; 0 where it is not linear.
        building: the class of the outermost module that was being made, loaded or moved.
        building_bytes: its parameters and buffers, on all devices.
        optimizer: an optimizer whose step ran.
        optimizer_name: the variable or attribute that it is; can be empty.
        containers: variables that are containers: "list" in a function that has a model, and
            "data" in another; "dict"; "default" of an argument; "bounded" if it grows no more;
            "deque" if it has a bound that it has not reached, also of an attribute.
        program: the source of the program.
        carried: variables that carry graphs.
        past: a variable with a graph that nothing reads before it is bound anew, and the bytes that
            no other graph has saved.
    """

    info: OomInfo
    watch: Watch
    began_bytes: int
    device: str = "cpu"
    entries: list[StorageEntry] = field(default_factory=list)
    total_bytes: int | None = None
    free_bytes: int | None = None
    others_bytes: int = 0
    fragmentation: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    site: str = ""
    raised_in: frozenset[str] = frozenset()
    is_recording: bool = False
    names: frozenset[str] = frozenset()
    called_names: frozenset[str] = frozenset()
    autocast_dtype: str = ""
    module: str = ""
    model: weakref.ref[nn.Module] | None = None
    batch_size: int = 0
    has_own_graph: bool = False
    all_in_eval: bool = False
    out_features: int = 0
    building: str = ""
    building_bytes: int = 0
    optimizer: weakref.ref[Optimizer] | None = None
    optimizer_name: str = ""
    containers: dict[str, str] = field(default_factory=dict)
    program: ProgramFiles = field(default_factory=ProgramFiles)
    carried: list[Carried] = field(default_factory=list)
    past: tuple[str, int] = "", 0

    @property
    def wanted_bytes(self) -> int:
        """What the allocation asked for; 0 where nothing tells."""
        return self.info.requested_bytes or 0

    @property
    def used_bytes(self) -> int:
        """What the tensors that were found take on the device."""
        return sum(entry.owner.n_bytes for entry in self.entries)

    @property
    def all_bytes(self) -> int:
        """What was in use, and what the allocation asked for."""
        return self.used_bytes + self.wanted_bytes

    @property
    def fixed_bytes(self) -> int:
        """What a model and its training take, whatever the batch."""
        return self.bytes_of(PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE)

    @property
    def movable_bytes(self) -> int:
        """All of the others, and what the allocation asked for."""
        return self.all_bytes - self.fixed_bytes

    @property
    def own_bytes(self) -> int:
        """The bytes of the device that this process has, found or not; 0 if nothing tells."""
        if self.total_bytes is None or self.free_bytes is None:
            return 0
        return self.total_bytes - self.free_bytes - self.others_bytes

    @property
    def of_total(self) -> str:
        """How much there is in all, as texts say it; empty where nothing tells."""
        return f" of {format_bytes(self.total_bytes)}" if self.total_bytes else ""

    @property
    def trains(self) -> bool:
        """Whether what ran is a part of training; autograd alone records in most evaluations."""
        steps = self.watch.n_steps or self.bytes_of(GRADIENTS, OPTIMIZER_STATE)
        return not self.all_in_eval and (
            BACKWARD in self.names or (self.is_recording and steps > 0)
        )

    def bytes_of(self, *categories: str) -> int:
        """Return the bytes of the tensors of some categories."""
        return sum(row.n_bytes for row in self.rows(*categories))

    def rows(self, *categories: str) -> list[TensorRow]:
        """Return the tensors of some categories."""
        rows = (entry.owner for entry in self.entries)
        return [row for row in rows if row.category in categories]

    def ask(self, look: Callable[[], object], what: str) -> None:
        """Look at one thing; if that fails, it is noted."""
        try:
            look()
        # short of memory: what else is known is told without it
        except MemoryError:
            self.notes.append(f"There was not enough memory left to look at {what}.")
        # a report of an error must not raise another one, whatever it meets in the program
        except Exception as error:
            self.notes.append(f"{what} could not be read: {type(error).__name__}.")

    def look(self, error: BaseException, frame: FrameType | None) -> None:
        """Look at everything once.

        Args:
            error: what ran inside is in its traceback.
            frame: what ran around it; None for an error that nobody handled, whose traceback has
                all that ran.
        """
        text = self.info.text
        self.device = self.info.device or "cpu"
        self.total_bytes, self.free_bytes = limit_bytes_in(text), free_bytes_in(text)
        self.ask(lambda: self._look_at_frames(error, frame), "what ran")
        self.ask(self._look_at_allocator, "the allocator")
        self.ask(self._look_at_tensors, "the tensors")
        self.ask(self._look_at_host, "the host's memory")

    # --- what ran

    def _look_at_frames(self, error: BaseException, frame: FrameType | None) -> None:
        # in a frame that has caught it and raised it again, the line that failed
        lines = dict(traceback.walk_tb(error.__traceback__))
        inside = list(lines)[::-1][:_MOST_FRAMES]
        around = traceback.walk_stack(frame) if frame is not None else ()
        # the frame that saw it is in the traceback as well
        frames = inside + [each for each, _ in islice(around, _MOST_FRAMES) if each not in inside]
        own = [each for each in frames if not is_library(each)]
        self.raised_in = frozenset(each.f_code.co_qualname for each in inside)
        self.site = ""
        if own:
            self.site = line_and_function(own[0].f_code, lines.get(own[0], own[0].f_lineno))
        self.is_recording = torch.is_grad_enabled()
        self.names = frozenset(each.f_code.co_name for each in frames)
        self.called_names = frozenset(name for each in frames for name in each.f_code.co_names)
        kinds = ("cuda", "cpu") if torch.is_autocast_cache_enabled() else ()
        dtypes = (torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k))
        self.autocast_dtype = next(map(dtype_name, dtypes), "")
        # code of any kind is read, and graphs of any size: if that fails, the rest is still known
        self.ask(lambda: self._look_at_objects(frames, own), "the modules that ran")
        self.ask(lambda: self._look_at_source(own), "the program")
        self.ask(lambda: self._look_at_graphs(own), "the graphs of variables")

    def _look_at_objects(self, frames: list[FrameType], own: list[FrameType]) -> None:
        called: list[tuple[Any, FrameType]] = []
        for frame in frames:
            subject: Any = dict(read_locals(frame)).get("self")
            name = frame.f_code.co_name
            is_module = is_kind(type(subject), nn.Module)
            if is_kind(type(subject), Optimizer) and name == "step" and self.optimizer is None:
                self.optimizer = weakref.ref(subject)
                variables = (each for frame in own for each in _variables_of(frame))
                self.optimizer_name = next((key for key, v in variables if v is subject), "")
            elif is_module and name == "forward":
                called.append((subject, frame))
            # A layer that is made within a forward is lazily made there: that is no building.
            elif is_module and name in _BUILDS and not called:
                self.building = type_name(type(subject))
                self.building_bytes = max(self.building_bytes, bytes_in(subject))
        if called:
            self._look_at_forward(*called[-1], [module for module, _ in called])

    def _look_at_forward(self, model: Any, frame: FrameType, modules: list[Any]) -> None:
        own = (each for each in modules if not type(each).__module__.startswith("torch."))
        innermost = next(own, modules[0])
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

    def _look_at_source(self, own: list[FrameType]) -> None:
        for frame in own:
            module, values = frame.f_globals.get("__name__"), frame.f_globals
            found = [] if frame.f_locals is values else [*read_locals(frame)]
            used = (values.get(name) for name in frame.f_code.co_names)
            has_model = any(_is_model(value) for value in (*used, *dict(found).values()))
            found += [(short(f"{module}.{name}"), value) for name, value in [*values.items()]]
            function = values.get(frame.f_code.co_name)
            defaults = (function.__defaults__ or ()) if type(function) is FunctionType else ()
            for name, value in found:
                if kind := _kind_of(value, has_model):
                    is_default = any(value is each for each in defaults)
                    self.containers.setdefault(name, "default" if is_default else kind)
            for name, value in _bounded_in(frame):
                self.containers.setdefault(name, _kind_of(value, has_model))
        self.program = ProgramFiles(own)

    def _look_at_graphs(self, own: list[FrameType]) -> None:
        past: dict[str, list[Any]] = {}
        live: list[Any] = []
        for frame in own:
            for name, t in _tensors_of(frame):
                node, plain = read(t, "grad_fn"), name.removesuffix("[…]").rpartition(".")[2]
                if node is None:
                    continue
                is_carried = plain in self.program.carried
                if not is_carried and "." not in name and _is_past(frame, plain):
                    past.setdefault(name, []).append(node)
                    continue
                live.append(node)
                if is_carried:
                    found = {node_number(each) for each in walk_nodes([node], {})} - {OF_A_LEAF}
                    n_steps = sum(min(found) < mark <= max(found) for mark in self.watch.marks)
                    saved = sum(_saved_by([node]).values())
                    self.carried.append(Carried(name, saved, n_steps, t.numel() == 1))
        shared = _saved_by(live)
        for name, nodes in past.items():
            n_bytes = sum(n for key, n in _saved_by(nodes).items() if key not in shared)
            self.past = max(self.past, (name, n_bytes), key=lambda found: found[1])

    # --- what there was

    def _look_at_tensors(self) -> None:
        for entry in take_census():
            device = entry.owner.device
            # an error that names no index is of the device that tensors are on
            if self.device in (device, device.partition(":")[0]) and self._counts(entry):
                self.device = device
                self.entries.append(entry)

    def _counts(self, entry: StorageEntry) -> bool:
        """Return whether a budget counts a tensor; it counts none from before its block.

        A model and its gradients stay: rules measure what ran by their bytes.
        """
        storage = None if entry.identity is None else entry.identity()
        if _OF_BUDGET not in self.info.text or storage is None:
            return True
        return entry.owner.category not in (OTHERS, SAVED) or is_counted(storage)

    def _look_at_allocator(self) -> None:
        counted = allocator_bytes(torch.device(self.device))
        if counted is None:
            return
        self.fragmentation = {
            "allocated_bytes": counted.allocated,
            "reserved_bytes": counted.reserved,
            "unused_bytes": counted.reserved - counted.allocated,
        }
        text, total, free = self.info.text, self.total_bytes, self.free_bytes
        # what a fraction leaves out is nobody's
        if total is not None and free is not None and allowed_bytes_in(text) is None:
            self.others_bytes = max(0, total - free - (own_bytes_in(text) or counted.reserved))
        if counted.largest_free is not None:
            self.fragmentation["largest_free_bytes"] = counted.largest_free

    def _look_at_host(self) -> None:
        group = _host_memory.tightest_group()
        told = {
            "rss_bytes": _host_memory.resident_bytes(),
            "free_bytes": _host_memory.free_host_bytes(),
            "limit_bytes": None if group is None else group.limit_bytes,
            "group_free_bytes": None if group is None else group.free_bytes,
            "own_limit_bytes": _host_memory.data_limit(),
        }
        self.host = {name: n_bytes for name, n_bytes in told.items() if n_bytes is not None}
        if self.device == "cpu" and self.total_bytes is None:
            self.total_bytes = told["own_limit_bytes"]


def short(name: str) -> str:
    """Return a name without the function or the module of the program that it is in."""
    return _PREFIX.sub("", name)


def bytes_in(module: Any, device: str = "") -> int:
    """Return the bytes of a module's tensors and gradients on a device; on all if it is ""."""
    try:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in tensors if p.grad is not None]
    # one that is being made has no registries yet
    except AttributeError:
        return 0
    return sum(t.nbytes for t in tensors if not device or str(t.device) == device)


def _variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame, and in the place of ``self`` its attributes."""
    for name, value in read_locals(frame):
        if name == "self":
            label = type_name(type(value))
            attributes = [*instance_attributes(value).items()]
            yield from ((f"{label}.{key}", inner) for key, inner in attributes)
        else:
            yield name, value


def _tensors_of(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are variables of a frame, and the last ones in its containers."""
    for name, value in _variables_of(frame):
        if is_kind(type(value), Tensor):
            yield name, value
            continue
        items = list(value.values()) if type(value) is dict else value
        items = [*items][-_MOST_ITEMS:] if type(items) in (list, tuple, deque) else []
        # as the state of an LSTM for each of its layers
        inner = (t for item in items for t in (item if type(item) is tuple else (item,)))
        yield from ((f"{name}[…]", t) for t in inner if is_kind(type(t), Tensor))


def _bounded_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Deques with a bound that are attributes, of ``self`` or of another variable of a frame."""
    for name, value in _variables_of(frame):
        inside = {} if is_kind(type(value), Tensor) else instance_attributes(value)
        named = [(name, value), *((f"{name}.{key}", inner) for key, inner in inside.items())]
        for each, inner in named:
            if type(inner) is deque and inner.maxlen is not None:
                yield each, inner


def _saved_by(nodes: Sequence[Any]) -> dict[int, int]:
    """Return the storages that graphs have saved, and the bytes of each."""
    found = saved_storages(Graphs(nodes)).items()
    return {key: each.record.n_bytes for key, each in found if not each.record.is_leaf}


def _is_past(frame: FrameType, name: str) -> bool:
    """Return whether the code that follows binds a variable anew before it reads it."""
    for step in dis.get_instructions(frame.f_code):
        # some instructions have two variables, as ``STORE_FAST_LOAD_FAST``
        verbs = _VERB.findall(step.opname)
        names = step.argval if type(step.argval) is tuple else (step.argval,)
        if step.offset > frame.f_lasti and verbs and name in names:
            return bool(verbs[names.index(name)] == "STORE")
    return False


def _is_model(value: Any) -> bool:
    """Return whether a variable is a module, or an object that has one."""
    inside = () if type(value) is ModuleType else instance_attributes(value).values()
    return any(is_kind(type(each), nn.Module) for each in (value, *inside))


def _kind_of(value: Any, has_model: bool) -> str:
    kind = type(value)
    # by identity: a metaclass may define __eq__
    if kind is deque and value.maxlen is not None:
        return "bounded" if len(value) == value.maxlen else "deque"
    if kind is list or kind is set or kind is deque:
        return "list" if has_model else "data"
    return "dict" if kind is dict else ""
