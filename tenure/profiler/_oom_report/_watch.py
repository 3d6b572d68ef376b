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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary as _Weak

import torch
from torch import Tensor, UntypedStorage
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function

from tenure._callers import module_of, stand_in, user_site
from tenure._heap import is_kind
from tenure._storages import storage_of
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.gradient_sums import next_sequence
from tenure._torch.modes import is_active, push_lowest, remove
from tenure._torch.optimizers import cell_of_step
from tenure._torch.patches import Patch

_OURS = "tenure.profiler._"
_FOR_PYTHON = handle_torch_function.__code__
_MOST_MARKS = 256
# A bias or a mask gives no more than the other operand has: this much more is seldom meant.
_MUCH_LARGER = 16
Tell = Callable[[BaseException, bool], None]
"""Gets each error, and whether nobody handles it; raises nothing."""

# by identity: any object may be called as a function of torch
_JOINS = frozenset(map(id, (torch.cat, torch.concat, torch.hstack, torch.vstack)))
_BACKWARDS = frozenset(map(id, (Tensor.backward, torch.autograd.grad)))


class Watch(TorchFunctionMode):
    """Tells of errors from `open` to `close`, the first of which comes on the thread that opens.

    Args:
        tell: gets them.

    Attributes:
        marks: for the last backward passes, how many nodes this thread had made by their end.
        n_steps: how many steps of optimizers there were.
        last_steps: for each optimizer the number of its last step.
        retained_at: the line of the last ``backward(retain_graph=True)``; empty without one.
        created_at: the same of ``create_graph=True``.
        joined: how often in a row `torch.cat` made a storage of a part of it, and the last line.
        broadcast: how the operation that failed last has made its operands larger, in words; empty
            if it has not.
    """

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell
        self._is_open = False
        self._hook: Any = None
        self._thread_hook: Any = None
        self._handle: Any = None
        # of each class of optimizers: the cell of its step, what was there, and what is
        self._cells: dict[int, tuple[Any, Any, Any]] = {}
        # torch.load() moves storages, of which no mode is told
        self._moves = Patch(UntypedStorage, {"to": self._around_move})
        self.marks: deque[int] = deque(maxlen=_MOST_MARKS)
        self.n_steps = 0
        self.last_steps: _Weak[Optimizer, int] = _Weak()
        self.retained_at = ""
        self.created_at = ""
        self.joined: _Weak[UntypedStorage, tuple[int, str]] = _Weak()
        self.broadcast = ""

    def open(self) -> None:
        """Begin."""
        self._handle = register_optimizer_step_pre_hook(self._step_begins)
        push_lowest(self)
        self._moves.begin()
        self._hook, self._thread_hook = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._excepthook, self._in_thread
        self._is_open = True

    def close(self) -> None:
        """End. A hook that was set after ours calls ours, which then only calls the one before."""
        self._is_open = False
        self._handle.remove()
        remove(self)
        self._moves.end()
        for cell, before, ours in self._cells.values():
            if cell.cell_contents is ours:
                cell.cell_contents = before
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        if threading.excepthook == self._in_thread:
            threading.excepthook = self._thread_hook

    def set_aside(self) -> bool:
        """Stop seeing errors of torch on this thread; False where they were not seen."""
        return remove(self)

    def set_back(self) -> None:
        """See them again."""
        push_lowest(self)

    # --- errors

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
            self.broadcast = ""
            # the error of the program goes on, whatever operands answer
            with suppress(Exception):
                self.broadcast = _broadcast_of(args)
            self._saw(error)
            raise
        if id(func) in _BACKWARDS:
            with suppress(Exception):
                self._note_backward(kwargs or {})
        elif id(func) in _JOINS:
            with suppress(Exception):
                self._note_join(args[0] if args else (kwargs or {})["tensors"], result)
        return result

    def _saw(self, error: BaseException) -> None:
        self._tell(error, False)
        # the program may print it; a bare raise adds no frame
        frames = error.__traceback__
        while frames is not None and module_of(frames.tb_frame).startswith(_OURS):
            frames = frames.tb_next
        error.__traceback__ = frames

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
        if cell is not None and id(cell) not in self._cells:
            before = cell.cell_contents
            ours = self._around(before)
            self._cells[id(cell)] = cell, before, ours
            cell.cell_contents = ours

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._is_open:
                return step(*args, **kwargs)
            # A step asks each parameter for tens of attributes, and a function mode is called for
            # each: in a small model that costs more than all else. A closure computes a loss, and
            # is seen as any other code.
            is_aside = len(args) == 1 and not kwargs and self.set_aside()
            try:
                result = step(*args, **kwargs)
            except Exception as error:
                if is_aside:
                    self._saw(error)
                raise
            finally:
                if is_aside and self._is_open:
                    self.set_back()
            self.n_steps += 1
            self.last_steps[args[0]] = self.n_steps
            return result

        return watched

    def _around_move(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return move(*args, **kwargs)
            except Exception as error:
                if is_active(self):
                    self._saw(error)
                raise

        return watched

    # --- notes

    def _note_backward(self, kwargs: Mapping[str, Any]) -> None:
        self.marks.append(next_sequence())
        if kwargs.get("retain_graph"):
            self.retained_at = str(user_site())
        if kwargs.get("create_graph"):
            self.created_at = str(user_site())

    def _note_join(self, operands: Any, result: Any) -> None:
        if type(result) is not Tensor or result.requires_grad:
            return
        largest = max((t for t in operands if is_kind(type(t), Tensor)), key=lambda t: t.numel())
        before, after = storage_of(largest), storage_of(result)
        # a part that is added to a larger whole, and not several that are joined once
        if before is not None and after is not None and 2 * largest.numel() >= result.numel():
            self.joined[after] = self.joined.get(before, (0, ""))[0] + 1, str(user_site())


def _broadcast_of(args: tuple[Any, ...]) -> str:
    """Describe two operands whose shapes give a result that is much larger than both."""
    operands = [each for each in args[:2] if is_kind(type(each), Tensor)]
    if len(operands) < 2:
        return ""
    first, second = (each.shape for each in operands)
    shape = torch.broadcast_shapes(first, second)
    if shape.numel() < _MUCH_LARGER * max(first.numel(), second.numel()):
        return ""
    return f"{list(first)} and {list(second)} broadcast to {list(shape)}"
