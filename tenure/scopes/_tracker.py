"""The one torch-function mode of a thread: it sees what torch returns and enters what is new.

One mode serves all scopes of a thread, however deep they nest, so that torch.compile sees at most
two states of the world: with it and without it. The handler is the hot path of the whole library.

A new tensor has no owner but the caller, and its reference count shows it. Where the count says
otherwise (a cache, a debugger, autograd or a memo holds it too) the call itself decides.
Measured on the 10,942 outputs of torch's own operator database: no tensor was judged wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, MethodWrapperType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from tenure._callers import SitedRef, capture_site, maker_of, module_of
from tenure._containers import passed_tensors
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.counting import SOLE
from tenure._torch.modes import function_mode_at, is_active, n_function_modes, push, remove

from ._library_objects import copies_library_object, is_library_code

if TYPE_CHECKING:
    from ._scope import DisposeScope

_DEEPCOPY = Tensor.__deepcopy__
getrefcount, getframe = sys.getrefcount, sys._getframe


def _counts(outs: Iterable[object]) -> set[int]:
    """Return the reference counts of the items of a container."""
    return set(map(getrefcount, outs))


_ALL_SOLE = _counts((object(),))
"""What `_counts` returns if the container alone holds each item: measured, as Pythons differ."""

current: ContextVar[DisposeScope | None] = ContextVar("tenure_current_scope", default=None)
"""The scope that the running code is in; it may be closed by now, or belong to another thread."""
get_current = current.get

_SEQUENCES = (tuple, list)
# code objects: a program that compiles functions as it runs must not fill the memory
_MANY = 4096
_WITHOUT_TENSORS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
    }
)


class World:
    """A stretch of a thread's mode stack in which its tracker stands.

    A backward hook, for one, runs with an empty stack: the first scope opened there pushes the
    tracker anew, and the last one closed takes it off again.
    """

    __slots__ = ("n_scopes", "outer")

    def __init__(self, outer: World | None) -> None:
        self.outer = outer
        self.n_scopes = 0


class Tracker(TorchFunctionMode):
    """Enters the new outputs of torch functions in the ledger of the current scope.

    Attributes:
        created: how many tensors it has entered, since the thread began.
        world: the innermost stretch of the mode stack in which it was pushed; None while no scope
            is open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.created = 0
        self._first_world = World(None)
        self.world: World | None = None
        # code that proved to be no library's, by identity: its hash is that of all its constants;
        # held, so that its identity stays its own
        self._admitted: dict[int, CodeType] = {}
        # the newest of them: often the only one that runs
        self._last: CodeType | None = None

    @never_compiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and track what it made."""
        # dynamo folds this, and must trace nothing of what follows
        if is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        # the most are called without keywords, and to pass none on costs a dictionary
        out = func(*args, **kwargs) if kwargs else func(*args)
        # Beside the operation itself each question here is dear, so the cheap come first.
        # One reference, our variable's, says that nobody had the tensor before: no cache, no
        # attribute, no argument; so it is new, whatever func is. See Note [Lifetimes and the
        # tracker], rule 1.
        # Views are new handles too. A property or an operation in place fails here at the price of
        # one count.
        if type(out) is Tensor and getrefcount(out) == SOLE:
            scope = get_current()
            # a scope without a note of places, open on this very thread (see DisposeScope._gate)
            if scope is not None and scope._gate is self:
                code = getframe(1).f_code
                # layers take turns at calling torch: one comparison serves a loop, and a lookup by
                # identity the others (see benchmarks.bench_scopes, "callers that take turns")
                if code is self._last or id(code) in self._admitted or self._admits(getframe(1)):
                    self.created += 1
                    # the dearest of all, a weak reference: it is what an entry is
                    scope._ledger[id(out)] = ref(out)
            elif scope is not None:
                self._enter([out], scope, getframe(1))
        # what is left is mostly a shape, a number or the tensor that was given to be filled; a
        # container is new as a whole if it alone holds each of its tensors
        elif type(out) not in _WITHOUT_TENSORS and not _was_given(out, args, kwargs):
            scope = get_current()
            if scope is not None and not (
                isinstance(out, _SEQUENCES)
                and scope._gate is self
                and self._enter_sole(out, scope, getframe(1))
            ):
                # counted here, because an argument is a reference or not, by the version of Python
                new = _new_of(getrefcount(out) == SOLE, out, func, (args, kwargs))
                if not new and not isinstance(out, Tensor):
                    new = self._in_array(out, scope)
                self._enter(new, scope, getframe(1), func is _DEEPCOPY)
        return out

    def enter_world(self) -> World:
        """Make sure that it sees what torch does here, for one more scope."""
        world = self.world
        if world is None:
            world = self.world = self._first_world
            push(self)
        else:
            n_modes = n_function_modes()
            # by far the most are opened where it is on top
            on_top = n_modes and function_mode_at(n_modes - 1) is self
            if not on_top and not is_active(self):
                world = self.world = World(world)
                push(self)
        world.n_scopes += 1
        return world

    def leave_world(self) -> None:
        """Stand on the stack no more, if no scope needs it there.

        A scope closed in a backward hook, which has a stack of its own, leaves it on that of the
        block: the end of the block takes it off, or the next scope takes it over.
        """
        world = self.world
        if world is not None and world.n_scopes == 0 and remove(self):
            self.world = world.outer

    def open_scope(self, scope: DisposeScope) -> DisposeScope | None:
        """Return the first scope from ``scope`` outwards that is open on this tracker's thread.

        A context that was copied into a task or a thread may still name a scope that has closed, or
        one that belongs elsewhere.
        """
        if scope._thread.tracker is not self:
            return None
        return scope if scope.is_open else scope.outer

    def _admits(self, frame: FrameType) -> bool:
        """Return whether tensors made by the code in ``frame`` belong to the block it runs in."""
        code = frame.f_code
        if id(code) in self._admitted:
            return True
        # See Note [Lifetimes and the tracker], rule 3.
        if is_library_code(module_of(frame), code.co_qualname):
            return False
        maker = maker_of(frame)
        # what a mode does, it does for whoever called torch, so its code is admitted for no one
        if maker is not frame:
            return not is_library_code(module_of(maker), maker.f_code.co_qualname)
        if len(self._admitted) >= _MANY:
            self._admitted.clear()
        self._admitted[id(code)] = self._last = code
        return True

    def _in_array(self, out: Any, scope: DisposeScope) -> list[Tensor]:
        """Return the tensor through which a NumPy array holds its memory, to report it.

        None for a scope that disposes: the array would be left with freed memory.
        """
        reporting = self.open_scope(scope)
        if reporting is None or reporting.policy == "dispose":
            return []
        base = getattr(out, "base", None)
        return [base] if isinstance(base, Tensor) else []

    def _enter_sole(self, outs: Sequence[Any], scope: DisposeScope, frame: FrameType) -> bool:
        """Enter outputs of which each is held by its container alone, and so is new.

        Returns:
            False where the long way has to decide; nothing has been entered then.
        """
        if _counts(outs) != _ALL_SOLE or any(type(out) is not Tensor for out in outs):
            return False
        if self._admits(frame):
            self.created += len(outs)
            ledger = scope._ledger
            for out in outs:
                ledger[id(out)] = ref(out)
        return True

    def _enter(
        self, tensors: list[Tensor], scope: DisposeScope, frame: FrameType, copied: bool = False
    ) -> None:
        """Enter containers, subclasses and captured sites, and scopes that are not simply open."""
        open_scope = self.open_scope(scope)
        if not tensors or open_scope is None or not self._admits(frame):
            return
        if copied and copies_library_object(frame):
            return
        self.created += len(tensors)
        capture = open_scope.capture
        site = capture_site(maker_of(frame), capture) if capture else None
        ledger = open_scope._ledger
        for tensor in tensors:
            if site is None:
                ledger[id(tensor)] = ref(tensor)
            else:
                # a report lists tensors as they were made: a dead entry must not lend its place
                ledger.pop(id(tensor), None)
                ledger[id(tensor)] = SitedRef(tensor, site)


HANDLER_CODE = Tracker.__torch_function__.__code__
"""The code of the frame that stands on the stack while torch runs a function for a scope."""


def _was_given(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an operation in place, or one with ``out=``, was given ``out`` to fill."""
    if args and out is args[0]:
        return True
    return kwargs is not None and kwargs.get("out") is out


# --- new, or a tensor that already existed


def _new_of(sole: bool, out: Any, func: Callable[..., Any], trees: tuple[Any, ...]) -> list[Tensor]:
    """Decide for outputs that more than the caller seems to hold, and for containers.

    Args:
        sole: whether nobody else holds the output.
        out: the output.
        func: what torch-function was asked to run.
        trees: its arguments.
    """
    # the memo of a deep copy holds it
    is_new = isinstance(out, Tensor) and (sole or func is _DEEPCOPY)
    if not is_new and _returns_existing(func):
        return []
    found = [each for each in passed_tensors(out) if not _is_parameter(each)]
    if is_new or not found:
        return found
    given = set(map(id, passed_tensors(trees)))
    return [each for each in found if id(each) not in given]


def _is_parameter(tensor: Tensor) -> bool:
    """``isinstance(tensor, Parameter)``, without its cost for the tensors that are none."""
    return type(tensor) is not Tensor and isinstance(tensor, Parameter)


def _returns_existing(func: Callable[..., Any]) -> bool:
    """Return whether ``func`` reads a property, or is Python of the user with its own cache."""
    if type(func) is MethodWrapperType:
        return True
    return isinstance(func, FunctionType) and (func.__module__ or "").partition(".")[0] != "torch"
