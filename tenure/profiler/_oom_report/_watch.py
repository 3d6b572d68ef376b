"""Who sees an error first, before the program handles it; and what is noted until then.

A function mode of torch stands around each call of torch on its thread, those of a backward pass
among them, and a function around each step of an optimizer. Errors of Python itself, of NumPy and
of other threads are seen where nobody handles them.

Invariant: an error goes on as the same object, whatever is done about it here; and nothing of the
program is kept alive: numbers, lines, and weak references.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function

from tenure._callers import module_of, stand_in, user_site
from tenure._heap import is_kind, read
from tenure._storages import storage_of
from tenure._torch.autograd import sequence_number
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.modes import push_lowest, remove
from tenure._torch.optimizers import cell_of_step
from tenure._torch.storages import key_of

_OURS = "tenure.profiler._"
_FOR_PYTHON = handle_torch_function.__code__
_FIRST_STEPS = 2
_MOST_MARKS = 256
_MOST_JOINED = 4096
_MOST_PARTS = 256
Tell = Callable[[BaseException, bool], None]
"""Gets each error, and whether nobody handles it; raises nothing."""

_JOINS = {id(func) for func in (torch.cat, torch.concat, torch.hstack, torch.vstack)}
_BACKWARDS = {id(func) for func in (Tensor.backward, torch.autograd.grad)}
# by identity: any object may be called as a function of torch
_NOTED = frozenset(_JOINS | _BACKWARDS)


class Joined(NamedTuple):
    """A storage that `torch.cat` made of one that it had made before, and so on.

    Attributes:
        storage: the storage.
        times: how often that happened in a row.
        site: the user's line of the last time.
    """

    storage: weakref.ref[UntypedStorage]
    times: int
    site: str


class Notes:
    """What a program did before memory ran out.

    Attributes:
        marks: for the last backward passes, the number of the node that each began with.
        n_backward: how many backward passes there were.
        n_steps: how many steps of optimizers there were.
        last_steps: for each optimizer the number of its last step.
        retained_at: the line of the last ``backward(retain_graph=True)``; empty without one.
        created_at: the same of ``create_graph=True``.
        joined: what grew by `torch.cat`, by the key of its storage.
        parts: for a module, the numbers of the backward passes before which it got submodules.
    """

    def __init__(self) -> None:
        self.marks: deque[int] = deque(maxlen=_MOST_MARKS)
        self.n_backward = 0
        self.n_steps = 0
        self.last_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.retained_at = ""
        self.created_at = ""
        self.joined: dict[int, Joined] = {}
        self.parts: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )

    def joined_as(self, storage: UntypedStorage | None) -> Joined | None:
        """How `torch.cat` made a storage."""
        found = None if storage is None else self.joined.get(key_of(storage))
        return found if found is not None and found.storage() is storage else None

    def times_of(self, module: nn.Module) -> dict[str, int]:
        """For each part that a module got, how many backward passes there had been."""
        # a class of the program may have no hash
        with suppress(TypeError):
            return self.parts.get(module, {})
        return {}

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note one call of a function of `_NOTED`."""
        if id(func) in _BACKWARDS:
            self._note_backward(args[0] if args else None, kwargs)
        elif type(result) is Tensor and not result.requires_grad:
            self._note_join(args[0] if args else kwargs.get("tensors"), result)

    def is_late(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has made the steps in which it makes its state."""
        return self._made.get(optimizer, 0) >= _FIRST_STEPS

    def note_step(self, optimizer: Optimizer) -> None:
        """Note a step that has ended."""
        self.n_steps += 1
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        self.last_steps[optimizer] = self.n_steps

    def note_part(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """Note a module that another one got."""
        with suppress(TypeError):
            parts = self.parts.setdefault(module, {})
            if len(parts) < _MOST_PARTS:
                parts[name] = self.n_backward

    def _note_backward(self, loss: Any, kwargs: Mapping[str, Any]) -> None:
        self.n_backward += 1
        for t in loss if type(loss) in (tuple, list) else (loss,):
            node = read(t, "grad_fn") if is_kind(type(t), Tensor) else None
            number = None if node is None else sequence_number(node)
            if number is not None:
                self.marks.append(number)
        if kwargs.get("retain_graph"):
            self.retained_at = str(user_site())
        if kwargs.get("create_graph"):
            self.created_at = str(user_site())

    def _note_join(self, operands: Any, result: Tensor) -> None:
        operands = operands if type(operands) in (tuple, list) else ()
        tensors = [t for t in operands if is_kind(type(t), Tensor)]
        largest = max(tensors, key=lambda t: t.numel(), default=None)
        # a part that is added to a larger whole, and not several that are joined once
        if largest is None or 2 * largest.numel() < result.numel():
            return
        before, after = storage_of(largest), storage_of(result)
        if before is None or after is None:
            return
        known = self.joined_as(before)
        if len(self.joined) >= _MOST_JOINED:
            self.joined = {k: each for k, each in self.joined.items() if each.storage() is not None}
        if len(self.joined) < _MOST_JOINED:
            times = 1 if known is None else known.times + 1
            self.joined[key_of(after)] = Joined(weakref.ref(after), times, str(user_site()))


class _ErrorMode(TorchFunctionMode):
    """Tells of each error that a function of torch raises on this thread, and notes calls."""

    def __init__(self, tell: Tell, notes: Notes) -> None:
        super().__init__()
        self._tell = tell
        self._notes = notes

    @never_compiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a block that catches costs nothing while nothing is raised."""
        # dynamo folds this, and must trace nothing of what follows
        if is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        # a function of torch in Python, whose warnings are about what called it
        if caller.f_code is _FOR_PYTHON and caller.f_back and caller.f_back.f_back:
            caller = caller.f_back.f_back
        try:
            result = stand_in(caller)(func, args, kwargs)
        except Exception as error:
            self._tell(error, False)
            # the program may print it; a bare raise adds no frame
            error.__traceback__ = _below_us(error.__traceback__)
            raise
        if id(func) in _NOTED:
            with suppress(Exception):
                self._notes.note(func, args, kwargs or {}, result)
        return result


def _below_us(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and module_of(frames.tb_frame).startswith(_OURS):
        frames = frames.tb_next
    return frames


class Watch:
    """Tells of errors from `open` to `close`, the first of which comes on the thread that opens.

    Args:
        tell: gets them.
        notes: gets what the program does until then.
    """

    def __init__(self, tell: Tell, notes: Notes) -> None:
        self._tell = tell
        self._notes = notes
        self._mode = _ErrorMode(tell, notes)
        self._is_open = False
        self._hook: Any = None
        self._thread_hook: Any = None
        self._handles: tuple[Any, ...] = ()
        # of each class of optimizers: the cell of its step, what was there, and what is
        self._steps: dict[int, tuple[Any, Any, Any]] = {}

    def open(self) -> None:
        """Begin."""
        self._handles = (
            register_module_module_registration_hook(self._notes.note_part),
            register_optimizer_step_pre_hook(self._step_begins),
        )
        push_lowest(self._mode)
        self._hook, self._thread_hook = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._excepthook, self._in_thread
        self._is_open = True

    def close(self) -> None:
        """End. A hook that was set after ours calls ours, which then only calls the one before."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        remove(self._mode)
        for cell, before, ours in self._steps.values():
            if cell.cell_contents is ours:
                cell.cell_contents = before
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        if threading.excepthook == self._in_thread:
            threading.excepthook = self._thread_hook

    def set_aside(self) -> bool:
        """Stop seeing errors of torch on this thread; False where they were not seen."""
        return remove(self._mode)

    def set_back(self) -> None:
        """See them again."""
        push_lowest(self._mode)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._tell(error, True)
        self._hook(kind, error, traceback)

    def _in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._tell(args.exc_value, True)
        self._thread_hook(args)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        """Stand around the steps of a class from its first on: torch calls no hook of an error."""
        cell = cell_of_step(optimizer)
        if cell is not None and id(cell) not in self._steps:
            before = cell.cell_contents
            ours = self._around(before)
            self._steps[id(cell)] = cell, before, ours
            cell.cell_contents = ours

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._is_open:
                return step(*args, **kwargs)
            # A step asks each parameter for tens of attributes, and a function mode is called for
            # each: in a small model that costs more than all else. A closure computes a loss, and
            # is seen as any other code.
            is_plain = len(args) == 1 and not kwargs
            is_aside = is_plain and self._notes.is_late(args[0]) and self.set_aside()
            try:
                result = step(*args, **kwargs)
            except Exception as error:
                if is_aside:
                    self._tell(error, False)
                    error.__traceback__ = _below_us(error.__traceback__)
                raise
            finally:
                if is_aside and self._is_open:
                    self.set_back()
            self._notes.note_step(args[0])
            return result

        return watched
