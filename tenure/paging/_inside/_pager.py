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

from tenure._errors import PagingError, PagingWarning
from tenure._torch.dynamo import never_compiled
from tenure._torch.entry_calls import calls_of, is_running
from tenure._warn import warn_user

from .._device import Engine, Page, UnpagedTensors
from .._model import HostTensor, Unit
from ._captured import captures, check_capture
from ._door import Door, name_of, place_of, waits_for_us
from ._results import apart_from

_LOOKS_UNTIL_A_WARNING = 4


@dataclass(eq=False, slots=True)
class _Frame:
    """A forward that runs, the pages it uses, and what it began amid.

    Attributes:
        token: what tells its module from others.
        handled: the exception that was being handled when it began.
        pages: what it uses.
        restores: put back what was changed for it, the last first.
    """

    token: object
    handled: BaseException | None
    pages: list[Page] = field(default_factory=list)
    restores: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class _Inside:
    """Who is inside.

    Attributes:
        thread: its id.
        name: of the class of the outermost module.
        call: the call of that module; None if it is compiled.
    """

    thread: int
    name: str
    call: int | None

    @property
    def was_interrupted(self) -> bool:
        """Whether a KeyboardInterrupt has ended the outermost forward: torch tells no hook then."""
        if self.call is None:
            return False
        # no variable of this frame may be a frame: it would keep all tensors of the stack
        if self.thread == get_ident():
            return not is_running(self.call, sys._getframe())
        return not is_running(self.call, sys._current_frames().get(self.thread))


class Pager:
    """Pages for the modules of one model.

    Args:
        engine: the pages.
        unpaged: the tensors that are not paged.
        hosts: the model's tensors.
    """

    def __init__(
        self, engine: Engine, unpaged: UnpagedTensors, hosts: Collection[HostTensor]
    ) -> None:
        self.engine = engine
        self._unpaged = unpaged
        self._hosts = hosts
        self._door = Door()
        self._leaving = RLock()  # whoever leaves for an interrupted forward: its thread or another
        self._inside: _Inside | None = None
        self._frames: list[_Frame] = []
        self._loose: list[Page] = []
        self._closed = False
        self._has_warned = False

    @property
    def is_inside(self) -> bool:
        """Whether a forward of the model runs on this thread."""
        inside = self._inside
        return inside is not None and inside.thread == get_ident()

    @property
    def is_outermost(self) -> bool:
        """Whether the forward that began last is the only one."""
        return len(self._frames) == 1

    def enter(
        self, token: object, units: list[Unit], module: nn.Module, entry: str = "forward"
    ) -> bool:
        """A forward begins: bring its units.

        Args:
            token: what tells this module from others.
            units: what its forward needs.
            module: the module.
            entry: its method that was called; each has an order of use of its own.

        Returns:
            Whether it did; not where the model was unpaged while this thread waited at the door.

        Raises:
            PagingError: it would train, or a graph is being captured, or there is no room for
                what it needs, or the thread that is inside waits for this one.
        """
        check_capture(self.engine.device, f"{type(module).__name__} is paged and was called")
        self._leave_interrupted()
        self._abandon_interrupted(token, module)
        self._door.acquire(self._look)
        if self._closed:
            self._door.release()
            return False
        frame = self._new_frame(token, module)
        if self.is_outermost:
            self._begin(module, (token, entry, module.training, torch.is_grad_enabled()))
        if module.training:
            self.engine.saves_buffers = True
        if units:
            self._let_go_of_loose()
            for page in self.engine.acquire_all(units):
                frame.pages.append(page)
            self.engine.prefetch()
        return True

    def _new_frame(self, token: object, module: nn.Module) -> _Frame:
        """The frame of a forward that begins; where there can be none, the door is let go."""
        frame = _Frame(token, sys.exception())
        try:
            if not self._frames:
                call = next(calls_of(module), None)
                self._inside = _Inside(get_ident(), type(module).__name__, call)
            self._frames.append(frame)
        except BaseException:  # an interruption, too: nobody leaves for a frame that is not there
            self._inside = self._inside if self._frames else None
            self._door.release()
            raise
        return frame

    def on_leave(self, restore: Callable[[], object]) -> None:
        """Have something put back when the forward that began last ends."""
        self._frames[-1].restores.append(restore)

    def apart(self, token: object, output: Any) -> Any:
        """What a forward returns, with copies of what lies in memory that others need.

        That of the outermost one is the user's, and all pages are needed again. Of others, the
        memory of their own units is: a table that the first layer gives out may be used by all.
        """
        if not self.is_inside or self._frames[-1].token is not token:
            return output
        passing = (page for page in self._frames[-1].pages if not page.is_resident)
        pages = self.engine.pages() if self.is_outermost else passing
        lent = {storage._cdata for page in pages if page.is_held() for storage in page.storages}
        return apart_from(lent, output) if lent else output

    def leave(self, token: object) -> None:
        """A forward ends: let go of what it used, and of what was interrupted inside it."""
        if not self.is_inside or all(frame.token is not token for frame in self._frames):
            return  # it never began: another hook before it raised
        while self._pop(is_end=self._frames[-1].token is token) is not token:
            pass

    @never_compiled
    def show(self, host: HostTensor) -> Tensor:
        """What stands for a host tensor where the caller is: on the device inside, else itself.

        Raises:
            PagingError: a graph is being captured: it would keep an address, or a wait break it.
        """
        check_capture(self.engine.device, f"{host.name!r} is paged and was read")
        self._leave_interrupted()
        if not self.is_inside:
            self.engine.let_host_write(host)
            return host.tensor
        if host.unit is None:
            return self._unpaged.shown(host)
        page = self.engine.page_in_use(host.unit)
        if page is None:
            self._let_go_of_loose()
            page = self.engine.acquire(host.unit)
            self._loose.append(page)
            self.engine.prefetch()
        return page.shown(host)

    def save(self) -> None:
        """Have on the host what the forward that runs has written so far."""
        self.engine.save()
        self._unpaged.save()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """A block that no other thread is inside in; when it begins, this thread leaves as well.

        Who waits at the door meanwhile finds the model unpaged, and runs it as it is then.
        """
        self._door.acquire(self._look)
        try:
            self._closed = True
            self._abandon()
            yield
        finally:
            self._door.release()

    def shrink(self, device: str | None, n_bytes: int | None) -> int:
        """Give device memory back: units that stayed pass from now on. See `Shrinkable`.

        Nothing while a graph is captured: to wait for the device would break it.
        """
        ours = self.engine.device
        is_asked = device in (None, ours.type, str(ours)) and not captures(ours)
        if not is_asked or not self._door.try_acquire():
            return 0
        try:
            return self.engine.give_back(
                self.engine.resident_bytes // 2 if n_bytes is None else n_bytes
            )
        finally:
            self._door.release()

    def _begin(self, module: nn.Module, kind: Hashable) -> None:
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
        if module.training and torch.is_grad_enabled() and self._asking():
            raise PagingError(
                f"{type(module).__name__} was called in training mode with gradients on, and its "
                "parameters are paged for inference: they would get no gradients. Nothing ran. "
                "Call eval(), or run under torch.no_grad(); to train, unpage() first."
            )
        if torch.is_grad_enabled() and not self._has_warned:
            self._warn_of_gradients(module)
        engine.prefetch()

    def _asking(self) -> list[str]:
        """The names of the parameters that ask for gradients."""
        hosts = (host for host in self._hosts if not host.is_buffer)
        return [host.name for host in hosts if host.tensor.requires_grad]

    def _warn_of_gradients(self, module: nn.Module) -> None:
        asking = self._asking()
        if asking:
            self._has_warned = True
            which = f"{len(asking)} of its parameters ask" if asking[1:] else "a parameter asks"
            warn_user(
                f"{type(module).__name__} is paged for inference and was called with gradients on, "
                f"and {which} for them, {asking[0]!r} for one: they get none. Call it under "
                "torch.no_grad(), or freeze them with requires_grad_(False); to train them, "
                "unpage() first.",
                PagingWarning,
            )

    def _pop(self, *, is_end: bool) -> object:
        frame = self._frames.pop()
        try:
            while frame.restores:
                frame.restores.pop()()
            for page in frame.pages:
                self.engine.release(page)
            if not self._frames:
                self._end(completed=is_end and sys.exception() is frame.handled)
            elif frame.pages:
                self.engine.prefetch()
        finally:
            if not self._frames:
                self._inside = None  # also where the end was not reached
            self._door.release()
        return frame.token

    def _end(self, *, completed: bool) -> None:
        engine = self.engine
        self._let_go_of_loose(held_too=True)
        self._inside = None
        engine.order.end(completed=completed)
        engine.meter.end()
        engine.prefetch()
        self._unpaged.save()
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
        inside = self._inside
        if inside is not None and inside.thread == get_ident() and inside.was_interrupted:
            with self._leaving:
                if self._inside is inside:
                    self._abandon()

    def _leave_for(self, gone: _Inside) -> None:
        """The same for another thread, which may never come back to the model."""
        with self._leaving:
            if self._inside is gone:
                self._door.seize(len(self._frames))
                self._inside = _Inside(get_ident(), gone.name, None)
                self._abandon()

    def _look(self, n_looks: int) -> None:
        """Look who is inside, where this thread waits at the door."""
        inside = self._inside
        if inside is None:
            return
        if inside.was_interrupted:
            self._leave_for(inside)
        elif waits_for_us(inside.thread):
            raise PagingError(
                f"{_told(inside)}, waits there for this thread, which waits to get into the model: "
                "one thread at a time can be inside, and neither would ever go on. Nothing was "
                "done on this thread. Call a paged model's parts on the thread of its forward, or "
                "unpage() before."
            )
        elif n_looks == _LOOKS_UNTIL_A_WARNING:
            warn_user(
                f"{_told(inside)}, and this thread waits until that ends: one thread at a time can "
                "be inside a paged model. If it waits for this one, neither will ever go on.",
                PagingWarning,
            )

    def _abandon_interrupted(self, token: object, module: nn.Module) -> None:
        """Leave forwards that a KeyboardInterrupt has ended: torch tells no hook of those."""
        if not self.is_inside or all(frame.token is not token for frame in self._frames):
            return
        n_expected = sum(frame.token is token for frame in self._frames)
        if sum(1 for _ in calls_of(module)) <= n_expected:  # this call has no frame of ours yet
            while self._pop(is_end=False) is not token:
                pass
            self._abandon_interrupted(token, module)


def _told(inside: _Inside) -> str:
    thread = inside.thread
    return f"{inside.name} is paged and runs on thread {name_of(thread)!r}{place_of(thread)}"
