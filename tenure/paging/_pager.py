"""Who is inside the model: while a module's forward runs, and on its thread, the device shows.

Invariant: what a forward took is released when it ends, however it ends. One thread at a time is
inside; the others wait. No wait, no event and no address of a paged model gets into a capture or a
trace. What asks for one is refused by name before anything is done; memory of a model that is
garbage waits for the end of the capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue
from threading import get_ident
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tenure._callers import warn_user
from tenure._errors import PagingError, PagingWarning
from tenure._graph_capture import captures_somewhere, is_capturing
from tenure._text import describe_tensor
from tenure._torch.compiler import never_compiled
from tenure._torch.modules import is_asking_where
from tenure._torch.quiet import aside
from tenure._torch.storages import key_of

from ._arguments import Arguments, apart_from, is_about_devices
from ._engine import Engine
from ._page import Composed, Page, in_place_of
from ._pass import Forward, Pass, Visit
from ._tensors import HostTensor, Unit, is_plain

_later: list[Callable[[], None]] = []


def captures(device: torch.device, *, waits: bool = False) -> bool:
    """Return whether this thread captures a graph, on the current or on this device.

    Args:
        device: this one.
        waits: whether the caller waits for the whole device; then captures of any thread count.
    """
    if is_capturing(device) or (waits and captures_somewhere(device)):
        return True
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        return False
    # A capture is asked for of the current device: with the model on a second one, of both.
    with module.device(device):
        return is_capturing(device)


def check_capture(device: torch.device, what: str, *, waits: bool = False) -> None:
    """Refuse what must not happen while a graph is captured.

    Args:
        device: where the model is paged to.
        what: what was done, to whom.
        waits: whether it waits for all of the device, and so breaks captures of other threads.

    Raises:
        PagingError: a graph is being captured; nothing was done, and the capture goes on.
    """
    if captures(device, waits=waits):
        raise PagingError(
            f"{what} while a graph is captured. Paging waits for the device, which no capture "
            "allows, and a replay would read the addresses of now, where other weights lie by "
            "then. Nothing was done. Capture a model that is not paged: call unpage() before, and "
            "move it to the device."
        )


def after_captures(device: torch.device, close: Callable[[], None]) -> None:
    """Give memory back now; while any graph is captured, at the first call of this after it."""
    _later.append(close)
    while not captures(device, waits=True):
        try:
            due = _later.pop()
        except IndexError:
            # None is left; another thread may have taken the last one.
            return
        due()


def asking(hosts: Collection[HostTensor]) -> list[HostTensor]:
    """Return the parameters that ask for gradients now: a user may freeze them at any time."""
    return [host for host in hosts if not host.is_buffer and host.tensor.requires_grad]


_LONG_WAIT_S = 4.0


class Turn:
    """A lock that one visit at a time has; a thread that waits long for it is told.

    The visit is the lock, so that an interruption leaves no lock without one.
    """

    def __init__(self) -> None:
        self._inside: dict[None, Visit] = {}
        # Has an item after a visit has ended, to wake a thread that waits.
        self._left: SimpleQueue[None] = SimpleQueue()

    @property
    def visit(self) -> Visit | None:
        """The visit that is inside."""
        return self._inside.get(None)

    def acquire(self, visit: Visit) -> None:
        """Wait until nobody is inside, and let a visit in."""
        is_told = False
        while not self.try_acquire(visit):
            try:
                self._left.get(timeout=_LONG_WAIT_S)
            except Empty:
                inside = self.visit
                if inside is not None and not is_told:
                    is_told = True
                    warn_user(
                        f"{inside.name} is paged and runs on thread {_name_of(inside.thread)!r}, "
                        "and this thread waits until that ends: one thread at a time can be inside "
                        "a paged model. If it waits for this one, neither will ever go on.",
                        PagingWarning,
                    )

    def try_acquire(self, visit: Visit) -> bool:
        """Let a visit in if nobody is inside; whether it is."""
        # One step: no other thread and no interruption comes between.
        return self._inside.setdefault(None, visit) is visit

    def release(self, visit: Visit) -> None:
        """End a visit; nothing if another one is inside."""
        if self.visit is visit:
            del self._inside[None]
            if self._left.empty():
                self._left.put(None)


class Pager:
    """Pages for the modules of one model.

    Args:
        engine: the pages.
        hosts: the model's tensors.
    """

    def __init__(self, engine: Engine, hosts: Collection[HostTensor]) -> None:
        self.engine = engine
        # the last host tensor that was read since a pass began, but in none
        self._read_outside: HostTensor | None = None
        self._hosts, self._has_warned = hosts, False
        self._composed = Composed(engine.device)
        self._turn = Turn()
        # What waited while the model was unpaged must not go on as if it were paged.
        self._closed = False

    @property
    def _pass(self) -> Pass | None:
        """The pass that runs, on this thread or another."""
        visit = self._turn.visit
        return visit if isinstance(visit, Pass) else None

    @property
    def is_inside(self) -> bool:
        """Whether a forward of the model runs on this thread."""
        now = self._pass
        return now is not None and now.thread == get_ident() and bool(now.forwards)

    @property
    def is_outermost(self) -> bool:
        """Whether the forward that began last is the only one."""
        now = self._pass
        return now is not None and len(now.forwards) == 1 and not now.is_backward

    def enter(self, forward: Forward, token: object, units: list[Unit], module: nn.Module) -> bool:
        """Note that a forward begins, and bring its units.

        Args:
            forward: it.
            token: stands for the method that was called; each has an order of use of its own.
            units: what it needs.
            module: whose it is.

        Returns:
            Whether it did; not if the model was unpaged while this thread waited.

        Raises:
            PagingError: it would train, or a graph is being captured, or there is no room for
                what it needs.
        """
        check_capture(self.engine.device, f"{type(module).__name__} is paged and was called")
        now = self._pass
        if now is None or now.thread != get_ident():
            kind = token, module.training, torch.is_grad_enabled()
            now = Pass(self.engine.access_order, kind, type(module).__name__)
            if not self._comes_in(now):
                return False
        now.forwards.append(forward)
        if self.is_outermost:
            self._begin(now, module)
        self.note_mode(module)
        if units:
            self._let_go_of_loose(now)
            for page in self.engine.acquire_all(units):
                forward.pages.append(page)
            self.engine.prefetch()
        return True

    def _comes_in(self, visit: Visit) -> bool:
        """Wait until no other thread is inside; whether the model is still paged then."""
        self._turn.acquire(visit)
        if self._closed:
            self._turn.release(visit)
        return not self._closed

    def arguments(self, forward: Forward, given: Any) -> Arguments | None:
        """Return the arguments of a forward; those of the outermost one come to the device."""
        # Inside, arguments are where the forward made them; to look through them for each layer
        # would take longer than small layers do.
        if not self.is_outermost:
            return None
        arguments = Arguments(given, "cpu", self.engine.device)
        self.on_leave(arguments.hand_back)
        return arguments

    def holds(self, units: list[Unit]) -> bool:
        """Return whether anything holds what was shown of some units, beyond their use."""
        pages = [self.engine.room.pages.get(unit) for unit in units]
        return any(page is not None and not page.users and page.is_held() for page in pages)

    def note_mode(self, module: nn.Module) -> None:
        """Note that a module runs as part of the pass."""
        if module.training and self._pass is not None:
            # Batch norm's kernels write its statistics without raising their version.
            self._pass.saves_buffers = True

    def on_leave(self, restore: Callable[[], object]) -> None:
        """Have something put back when the forward that began last ends."""
        assert self._pass is not None
        self._pass.forwards[-1].restores.append(restore)

    @never_compiled
    def result(self, forward: Forward, output: Any) -> Any:
        """Return the result of forward, with copies of tensors in memory that others need.

        That of the outermost one is the user's, and all pages are needed again. Of others, the
        memory of their own units is: a table that the first layer gives out may be used by all.
        """
        now = self._pass
        if now is None or not self.is_inside or now.forwards[-1] is not forward:
            return output
        passing = (page for page in forward.pages if not page.is_resident)
        pages = list(self.engine.room.pages.values()) if self.is_outermost else passing
        lent = {key_of(storage) for page in pages if page.is_held() for storage in page.storages}
        return apart_from(lent, output) if lent else output

    @never_compiled
    def leave(self, forward: Forward) -> None:
        """Release the units that a forward used, when it ends; a second call does nothing."""
        now = self._pass
        if now is None or now.thread != get_ident():
            return
        try:
            while forward in now.forwards:
                self._pop(now)
        finally:
            # Also if the end was not reached.
            if self._is_over(now):
                self._turn.release(now)

    def explain(self, error: BaseException | None) -> None:
        """Add a note to an error about two devices, if a parameter was used out of a forward."""
        if self._closed or not is_about_devices(error):
            return
        host, there = self._used_outside(error.__traceback__), str(self.engine.device)
        if host is not None:
            error.add_note(
                "Parameters of a paged model are on the host outside of its forward, as is "
                f"{host.name!r}, {describe_tensor(host.tensor)}, which was used or read there. "
                f"To use one with tensors on {there}, take a copy, such as weight.to({there!r}), "
                "whose gradient arrives at the parameter; or compute it in the forward, or in a "
                "method that you name: page(..., methods=)."
            )

    @never_compiled
    def show(self, host: HostTensor) -> Tensor:
        """Return the device's tensor for a host tensor inside a pass, else the host tensor.

        Raises:
            PagingError: a graph is being captured: it would keep an address, or a wait break it.
        """
        check_capture(self.engine.device, f"{host.name!r} is paged and was read")
        now = self._pass
        if now is None or not self.is_inside:
            # Whoever reads a parameter outside of the forward may write to it, and no version tells
            # of fused optimizers, collectives or `.data`. generate() asks for each token where the
            # model is, and would have the embedding copied each time.
            if not is_asking_where(sys._getframe(1)):
                self.engine.let_host_write(host)
            self._read_outside = host
            return host.tensor
        if host in now.assigned:
            return now.assigned[host]
        if host.parts:
            return self._composed.of(
                host, {id(each.tensor): self.show(each) for each in host.parts}
            )
        if host.unit is None:
            # Without elements, and so in no page
            with aside():
                there = host.tensor.detach().to(self.engine.device)
            return in_place_of(host.tensor, there)
        return self.engine.shown(self._page_of(host.unit, now), host)

    @never_compiled
    def assign(self, host: HostTensor, entry: Tensor, *, may_stand: bool) -> bool:
        """Let a tensor of the same form, which the forward assigns, stand for a host tensor.

        Until the pass ends, the program may write to it through another reference. So its values
        are copied to the host when the pass ends.

        Args:
            host: the host tensor.
            entry: what is assigned.
            may_stand: whether a tensor may stand for it that is not the one that is shown.

        Returns:
            Whether the host tensor is to stay registered; else the entry itself is.
        """
        now = self._pass
        assert now is not None
        now.assigned.pop(host, None)
        if _is_same(self.show(host), entry):
            return True
        # Another name would get the values, too.
        if not may_stand or host.is_shared or isinstance(entry, nn.Parameter):
            return False
        if entry.device != self.engine.device:
            return False
        now.assigned[host] = entry
        return True

    def save(self) -> dict[HostTensor, Tensor]:
        """Have on the host what the forward that runs has written so far.

        Returns:
            What it has assigned, which comes to the host when it ends.
        """
        self._composed.settle()
        self.engine.save()
        return {} if self._pass is None else self._pass.assigned

    def close(self, undo: Callable[[], object]) -> None:
        """Undo the paging while nobody is inside; a forward of this thread is left before.

        Who waits meanwhile finds the model unpaged, and runs it as it is then.
        """
        inside = self._turn.visit
        visit = inside if inside is not None and inside.thread == get_ident() else Visit()
        try:
            try:
                if visit is not inside:
                    self._turn.acquire(visit)
                # Before anything is put back, for who waits looks at it next.
                self._closed = True
                if isinstance(visit, Pass):
                    self._abandon(visit)
                undo()
            finally:
                self._turn.release(visit)
        finally:
            # The first may have been interrupted.
            self._turn.release(visit)

    def shrink(self, device: str | None, n_bytes: int | None) -> int:
        """Give device memory back: units that stayed pass from now on. See `Shrinkable`.

        Nothing while a graph is captured: to wait for the device would break it.
        """
        ours = self.engine.device
        if device not in (None, ours.type, str(ours)):
            return 0
        given_bytes = self.give_back(
            self.engine.room.resident_bytes // 2 if n_bytes is None else n_bytes
        )
        if given_bytes:
            self.engine.room.lease.gave_back()
        return given_bytes

    def give_back(self, n_bytes: int) -> int:
        """Give back any memory; models that share it do not count it as an error."""
        # Without waiting: the thread inside may be the one that waits for this memory.
        inside, visit = self._turn.visit, Visit()
        is_ours = inside is not None and inside.thread == get_ident()
        if captures(self.engine.device, waits=True):
            return 0
        try:
            if not (is_ours or self._turn.try_acquire(visit)):
                return 0
            return 0 if self._closed else self.engine.room.give_back(n_bytes)
        finally:
            self._turn.release(visit)

    def _used_outside(self, traceback: TracebackType | None) -> HostTensor | None:
        """Return the host tensor that an error outside of a forward may be about.

        That is a variable of a function that failed, else the last one that was read.
        """
        known = {id(host.tensor): host for host in self._hosts}
        for frame, _ in reversed([*walk_tb(traceback)]):
            for value in frame.f_locals.values():
                if id(value) in known:
                    return known[id(value)]
        return self._read_outside

    def _page_of(self, unit: Unit, now: Pass) -> Page:
        page = self.engine.page_in_use(unit)
        # No forward that runs brackets its unit: a model that reads `layer.weight` itself, as tied
        # heads and functional layers do, has it until it lets go.
        if page is None:
            self._let_go_of_loose(now)
            page = self.engine.acquire(unit)
            now.loose.append(page)
            self.engine.prefetch()
        return page

    def _is_over(self, now: Pass) -> bool:
        return not (now.forwards or now.is_backward)

    def _begin(self, now: Pass, module: nn.Module) -> None:
        self._read_outside = None
        self.engine.begin(now)
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            raise PagingError(
                f"{now.name} is traced by torch.jit while it is paged: the trace would keep the "
                "places that weights pass through, and read others there later. Call unpage() "
                "first."
            )
        if torch.is_grad_enabled():
            self._check_gradients(module)
        self.engine.prefetch()

    def _check_gradients(self, module: nn.Module) -> None:
        """Refuse a pass that would train, and warn once of gradients that nobody gets."""
        if self._has_warned and not module.training:
            return
        found = asking(self._hosts)
        if found and module.training:
            raise PagingError(
                f"{type(module).__name__} was called in training mode with gradients on, and its "
                "parameters are paged for inference: they would get no gradients. Nothing ran. "
                "Call eval(), or run under torch.no_grad(); to train, page it with training=True."
            )
        if found:
            self._has_warned = True
            which = f"{len(found)} of its parameters ask" if found[1:] else "a parameter asks"
            warn_user(
                f"{type(module).__name__} is paged for inference and was called with gradients on, "
                f"and {which} for them, {found[0].name!r} for one: they get none. Call it under "
                "torch.no_grad(), or freeze them with requires_grad_(False); to train them, page "
                "it with training=True.",
                PagingWarning,
            )

    def _pop(self, now: Pass) -> None:
        """Leave the forward that began last."""
        forward = now.forwards[-1]
        while forward.restores:
            forward.restores.pop()()
        self._composed.settle()
        is_bracket = bool(forward.pages)
        while forward.pages:
            self.engine.release(forward.pages.pop(0))
        now.forwards.remove(forward)
        if self._is_over(now):
            self._end(now, completed=forward.has_completed)
        elif is_bracket:
            self.engine.prefetch()

    def _end(self, now: Pass, *, completed: bool) -> None:
        self._let_go_of_loose(now, held_too=True)
        now.end(completed=completed)
        if now.assigned:
            # Writes to a page were made before.
            self.engine.let_host_read()
            for host, entry in now.assigned.items():
                self.engine.set_host(host, entry)
        self.engine.end()
        self.engine.let_host_read()
        if completed and self.engine.room.moved:
            raise PagingError(
                f"{self.engine.room.moved[0].name!r} was given other memory or another form in the "
                f"forward of {now.name}, as by Tensor.set_(), where it is paged. It has the values "
                "that it had before. Write them with weight.copy_(values), or unpage() first."
            )

    def _let_go_of_loose(self, now: Pass, *, held_too: bool = False) -> None:
        """Release the pages that no forward brackets and whose tensors nobody holds any more."""
        self._composed.settle()
        still_held = []
        for page in now.loose:
            if page.is_held() and not held_too:
                still_held.append(page)
            else:
                self.engine.release(page)
        now.loose = still_held

    def _abandon(self, now: Pass) -> None:
        """Leave every forward of a pass of this thread, as if each had raised."""
        while now.forwards:
            self._pop(now)


def _is_same(shown: Tensor, entry: Tensor) -> bool:
    """Return whether two tensors of one form are equal, or the same memory in one order."""
    return entry is shown or (
        is_plain(entry)
        and is_plain(shown)
        and entry.data_ptr() == shown.data_ptr()
        and entry.stride() == shown.stride()
    )


def _name_of(thread: int) -> str:
    names = (each.name for each in threading.enumerate() if each.ident == thread)
    return next(names, f"{thread}, which has ended")
