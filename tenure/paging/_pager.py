"""Who is inside the model: while a module's forward runs, and on its thread, the device shows.

Invariant: what a forward took is released when it ends, however it ends. One thread at a time is
inside; the others wait at the door.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._torch_dynamo import never_compiled

from ._engine import Engine
from ._page import Page
from ._table import HostTensor
from ._units import Unit
from ._whole import WholeTensors

_CALL = nn.Module._call_impl.__code__


@dataclass(eq=False, slots=True)
class _Frame:
    """A forward that runs, the pages it uses, and what it began amid.

    Attributes:
        token: what tells its module from others.
        handled: the exception that was being handled when it began.
        pages: what it uses.
        restore: puts back what was changed for it.
    """

    token: object
    handled: BaseException | None
    pages: list[Page] = field(default_factory=list)
    restore: Callable[[], object] | None = None


class Pager:
    """Pages for the modules of one model.

    Args:
        engine: the pages.
        whole: the tensors that are not paged.
        hosts: the model's tensors.
    """

    def __init__(self, engine: Engine, whole: WholeTensors, hosts: Collection[HostTensor]) -> None:
        self.engine = engine
        self._whole = whole
        self._hosts = hosts
        self._door = RLock()
        self._thread: int | None = None
        self._frames: list[_Frame] = []
        self._loose: list[Page] = []
        self._closed = False
        self._call: int | None = None

    @property
    def is_inside(self) -> bool:
        """Whether a forward of the model runs on this thread."""
        return self._thread == get_ident()

    @property
    def is_outermost(self) -> bool:
        """Whether the forward that began last is the only one."""
        return len(self._frames) == 1

    def enter(self, token: object, units: list[Unit], module: nn.Module) -> bool:
        """A forward begins: bring its units.

        Args:
            token: what tells this module from others.
            units: what its forward needs.
            module: the module.

        Returns:
            Whether it did; not where the model was unpaged while this thread waited at the door.

        Raises:
            PagingError: it would train, or there is no room for what it needs.
        """
        self._leave_interrupted()
        self._abandon_interrupted(token, module)
        self._door.acquire()
        if self._closed:
            self._door.release()
            return False
        frame = _Frame(token, sys.exception())
        self._frames.append(frame)
        if self.is_outermost:
            self._begin(module, (token, module.training, torch.is_grad_enabled()))
        if module.training:
            self.engine.saves_buffers = True
        if units:
            self._let_go_of_loose()
            for page in self.engine.acquire_all(units):
                frame.pages.append(page)
            self.engine.prefetch()
        return True

    def on_leave(self, restore: Callable[[], object]) -> None:
        """Have something put back when the forward that began last ends."""
        self._frames[-1].restore = restore

    def leave(self, token: object) -> None:
        """A forward ends: let go of what it used, and of what was interrupted inside it."""
        if not self.is_inside or all(frame.token is not token for frame in self._frames):
            return  # it never began: another hook before it raised
        while self._pop(is_end=self._frames[-1].token is token) is not token:
            pass

    @never_compiled
    def show(self, host: HostTensor) -> Tensor:
        """What stands for a host tensor where the caller is: on the device inside, else itself."""
        self._leave_interrupted()
        if not self.is_inside:
            self.engine.let_host_write(host)
            return host.tensor
        if host.unit is None:
            return self._whole.shown(host)
        page = self.engine.page_in_use(host.unit)
        if page is None:
            self._let_go_of_loose()
            page = self.engine.acquire(host.unit)
            self._loose.append(page)
            self.engine.prefetch()
        return page.shown(host)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """A block that no other thread is inside in; when it begins, this thread leaves as well.

        Who waits at the door meanwhile finds the model unpaged, and runs it as it is then.
        """
        with self._door:
            self._closed = True
            self._abandon()
            yield

    def shrink(self, device: str | None, n_bytes: int | None) -> int:
        """Give device memory back: units that stayed pass from now on. See `Shrinkable`."""
        ours = self.engine.device
        if device not in (None, ours.type, str(ours)) or not self._door.acquire(blocking=False):
            return 0
        try:
            return self.engine.give_back(
                self.engine.resident_bytes // 2 if n_bytes is None else n_bytes
            )
        finally:
            self._door.release()

    def _begin(self, module: nn.Module, kind: Hashable) -> None:
        self._thread = get_ident()
        self._call = next(_calls_of(module), None)
        self._loose.clear()
        engine = self.engine
        engine.begin()
        engine.saves_buffers = False
        engine.order.begin(kind)
        engine.meter.begin()
        if torch._C._get_tracing_state() is not None:
            raise PagingError(
                f"{type(module).__name__} is traced by torch.jit while it is paged: the trace "
                "would keep the places that weights pass through, and read others there later. "
                "Call unpage() first."
            )
        if module.training and torch.is_grad_enabled() and self._asks_for_gradients():
            raise PagingError(
                f"{type(module).__name__} was called in training mode with gradients on, and its "
                "parameters are paged for inference: they would get no gradients. Nothing ran. "
                "Call eval(), or run under torch.no_grad(); to train, unpage() first."
            )
        engine.prefetch()

    def _asks_for_gradients(self) -> bool:
        return any(host.tensor.requires_grad for host in self._hosts if not host.is_buffer)

    def _pop(self, *, is_end: bool) -> object:
        frame = self._frames.pop()
        try:
            if frame.restore is not None:
                frame.restore()
            for page in frame.pages:
                self.engine.release(page)
            if not self._frames:
                self._end(completed=is_end and sys.exception() is frame.handled)
            elif frame.pages:
                self.engine.prefetch()
        finally:
            if not self._frames:
                self._thread = None  # also where the end was not reached
            self._door.release()
        return frame.token

    def _end(self, *, completed: bool) -> None:
        engine = self.engine
        self._let_go_of_loose(held_too=True)
        self._thread = None
        engine.order.end(completed=completed)
        engine.meter.end()
        engine.prefetch()
        self._whole.save()
        engine.let_host_read()

    def _let_go_of_loose(self, *, held_too: bool = False) -> None:
        """Release the pages that no forward brackets and whose tensors nobody holds any more."""
        still_held = []
        for page in self._loose:
            if page.is_held() and not held_too:
                still_held.append(page)
            else:
                self.engine.release(page)
        self._loose = still_held

    def _abandon(self) -> None:
        """Leave every forward of this thread, as if each had raised."""
        while self._frames:
            self._pop(is_end=False)

    def _leave_interrupted(self) -> None:
        """Leave all forwards where a KeyboardInterrupt has ended the outermost one."""
        if self.is_inside and self._call is not None and not _is_running(self._call):
            self._abandon()

    def _abandon_interrupted(self, token: object, module: nn.Module) -> None:
        """Leave forwards that a KeyboardInterrupt has ended: torch tells no hook of those."""
        if not self.is_inside or all(frame.token is not token for frame in self._frames):
            return
        n_expected = sum(frame.token is token for frame in self._frames)
        if sum(1 for _ in _calls_of(module)) <= n_expected:  # this call has no frame of ours yet
            while self._pop(is_end=False) is not token:
                pass
            self._abandon_interrupted(token, module)


def _calls_of(module: nn.Module) -> Iterator[int]:
    """The calls of a module on this thread's stack, the innermost first; none if it is compiled.

    By the ids of their frames, for a frame that is held holds its tensors.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            yield id(frame)
        frame = frame.f_back


def _is_running(call: int) -> bool:
    """Whether a call, by the id of its frame, is on this thread's stack."""
    frame: Any = sys._getframe()
    while frame is not None and not (id(frame) == call and frame.f_code is _CALL):
        frame = frame.f_back
    return frame is not None
