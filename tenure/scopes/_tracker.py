"""The one torch-function mode of a thread: it sees what torch returns and enters it in a ledger.

One mode serves all scopes of a thread, however deep they nest, so that torch.compile sees at most
two states of the world: with it and without it. The handler is the hot path of the whole library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tenure._callers import SitedRef, capture_site, maker_of, module_of
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._library_objects import copies_library_object, is_library_code
from ._newness import DEEPCOPY, SOLE, flat_tensors, is_new, is_parameter, new_among

if TYPE_CHECKING:
    from ._block import Block

getrefcount, getframe = sys.getrefcount, sys._getframe

current: ContextVar[Block | None] = ContextVar("tenure_current_scope", default=None)
"""The scope that the running code is in; it may be closed by now, or belong to another thread."""
get_current = current.get

_SEQUENCES = (tuple, list)
_SOLE_IN_CONTAINER = SOLE + 1 if SOLE else 0
_MANY = 4096  # code objects: a program that compiles functions as it runs must not fill the memory
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


class Manager(TorchFunctionMode):
    """Enters the new outputs of torch functions in the ledger of the current scope.

    Attributes:
        created: how many tensors it has entered, since the thread began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.created = 0
        # code that proved to be no library's, by identity: its hash is that of all its constants
        self._admitted: dict[int, CodeType] = {}
        self._last: CodeType | None = None  # the newest of them: often the only one that runs

    @never_compiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and track what it made."""
        if is_dynamo_compiling():  # folded by dynamo, which must trace nothing of what follows
            return func(*args, **(kwargs or {}))
        out = func(*args, **kwargs) if kwargs else func(*args)
        if type(out) is Tensor and getrefcount(out) == SOLE:
            scope = get_current()
            if scope is not None and scope._gate is self:
                code = getframe(1).f_code
                if code is self._last or id(code) in self._admitted or self._admits(getframe(1)):
                    self.created += 1
                    scope._ledger[id(out)] = ref(out)
            elif scope is not None:
                self._enter([out], scope, getframe(1))
        elif type(out) not in _WITHOUT_TENSORS and not _was_given(out, args, kwargs):
            scope = get_current()
            if scope is not None and not (
                isinstance(out, _SEQUENCES)
                and scope._gate is self
                and self._enter_sole(out, scope, getframe(1))
            ):
                self._enter(
                    _new_of(out, func, (args, kwargs)), scope, getframe(1), func is DEEPCOPY
                )
        return out

    def open_scope(self, scope: Block) -> Block | None:
        """From ``scope`` outwards, the first that is open on the thread of this manager.

        A context that was copied into a task or a thread may still name a scope that has closed, or
        one that belongs elsewhere.
        """
        if scope._threads.manager is not self:
            return None
        return scope if scope.is_open else scope.outer

    def _admits(self, frame: FrameType) -> bool:
        """Whether tensors made by the code in ``frame`` belong to the block it runs in."""
        code = frame.f_code
        if id(code) in self._admitted:
            return True
        if is_library_code(module_of(frame), code.co_name):
            return False
        maker = maker_of(frame)
        if maker is not frame:  # what a mode does, it does for whoever called torch
            return not is_library_code(module_of(maker), maker.f_code.co_name)
        if len(self._admitted) >= _MANY:
            self._admitted.clear()
        self._admitted[id(code)] = self._last = code
        return True

    def _enter_sole(self, outs: Sequence[Any], scope: Block, frame: FrameType) -> bool:
        """Enter outputs of which each is held by its container alone, and so is new.

        Returns:
            False where the long way has to decide; nothing has been entered then.
        """
        for out in outs:
            if type(out) is not Tensor or getrefcount(out) != _SOLE_IN_CONTAINER:
                return False
        if self._admits(frame):
            self.created += len(outs)
            ledger = scope._ledger
            for out in outs:
                ledger[id(out)] = ref(out)
        return True

    def _enter(
        self, tensors: list[Tensor], scope: Block, frame: FrameType, copied: bool = False
    ) -> None:
        """The long way: for containers, subclasses, captured sites, and scopes not simply open."""
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


HANDLER_CODE = Manager.__torch_function__.__code__
"""The code of the frame that stands on the stack while torch runs a function for a scope."""


def _was_given(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether ``out`` is what an operation in place, or one with ``out=``, was given to fill."""
    if args and out is args[0]:
        return True
    return kwargs is not None and kwargs.get("out") is out


def _new_of(out: Any, func: Callable[..., Any], trees: tuple[Any, ...]) -> list[Tensor]:
    if isinstance(out, Tensor):
        sole = getrefcount(out) == SOLE + 1 and not is_parameter(out)
        return [out] if sole or is_new(out, func, trees) else []
    return new_among(flat_tensors((out,)), func, trees)
