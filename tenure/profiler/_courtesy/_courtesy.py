"""Lending a device to others: what the program holds there waits in host memory, and comes back.

Until every byte has been copied nothing is changed; from then on a storage is away until its bytes
are back, one by one. So whatever goes wrong at whatever point, nothing is lost and ``restore()``
can be called again.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage

from tenure._callers import warn_user
from tenure._errors import CourtesyError, CourtesyWarning
from tenure._graph_capture import is_capturing
from tenure._text import format_bytes, listed
from tenure._torch.device_allocator import clear_workspaces
from tenure._torch.quiet import quietly

from .._allocator import allocator_bytes
from . import _staging
from ._away import Moved
from ._courtesy_report import CourtesyReport, Stay
from ._inventory import Holding, take_inventory
from ._leaving import prepare

# one at a time: two that move the same storage would each think that the other's bytes are its own
_turn = RLock()
# what is away must come back, even if the program has dropped the object that can bring it back
_unfinished: set[Courtesy] = set()
_SHOWN = 3


class Courtesy:
    """A block in which the tensors of this process take no memory of a device.

    The bytes of every storage wait in host memory and return at the end of the block: parameters,
    gradients, optimizer states, and what only a graph of autograd holds. All objects stay what
    they are, with their identities, sharing, strides, versions and hooks, so a graph that was
    recorded before can run backward afterwards. The allocator's cached memory is returned to the
    driver as well, for other processes, and with it what torch keeps for cuBLAS, if no other thread
    runs, and autocast's cache of cast weights, which are then cast anew.

    Meanwhile a tensor that is away answers what it is (``shape``, ``device``, ``grad``) and
    refuses everything else with an AwayTensorError, and so does a backward pass that needs it. It
    can be let go, its gradient too. Other threads must not use tensors of the device while
    ``yield_memory()`` or ``restore()`` runs.

    What can't be moved stays, and the report and a CourtesyWarning name it. Memory of the host is
    never moved, so on a machine without an accelerator the block changes nothing.

    Args:
        device: the device to leave, as ``"cuda:1"``; ``"cuda"`` for all of that type, None for
            all accelerators.

    Attributes:
        device: the same, as a ``torch.device``.
        report: what the last ``yield_memory()`` did; None before the first.

    Raises:
        CourtesyError: ``device`` is none.

    Example:
        >>> from tenure.profiler import Courtesy
        >>> with Courtesy() as courtesy:  # nothing lies on an accelerator here
        ...     print(courtesy.report.moved_bytes)
        0

    Source: ``Courtesy`` of pytorch_memlab.
    """

    def __init__(self, device: str | int | torch.device | None = None) -> None:
        self.device = None if device is None else _device(device)
        self.report: CourtesyReport | None = None
        self._moved: dict[int, Moved] = {}
        self._is_entered = False

    @property
    def away_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(moved.n_bytes for moved in list(self._moved.values()))

    def yield_memory(self) -> CourtesyReport:
        """Move what lies on the device to host memory; what is away already stays away.

        Returns:
            What was moved and what stayed.

        Raises:
            CourtesyError: the host has no memory for it, or a graph is being captured, and nothing
                was moved.

        Warns:
            CourtesyWarning: some of it can't be moved.
        """
        with _turn, quietly():
            _refuse_capture(self._devices_to_leave(), "moved to host memory", self)
            going, report = self._leave()
        self.report = report
        if report.stays:
            try:
                warn_user(_warning(report), CourtesyWarning)
            except CourtesyWarning:
                # an error to this program: leave nothing half done
                with _turn, quietly():
                    self._return(going)
                raise
        return report

    def restore(self) -> None:
        """Bring back what is away; tensors that have died meanwhile are left out.

        Raises:
            CourtesyError: a device has no memory for all of it. The rest stays in host memory, and
                another call brings it back once there is room. Or a graph is being captured, and
                nothing was brought back.
        """
        with _turn, quietly():
            _refuse_capture({moved.device for moved in self._moved.values()}, "brought back", self)
            failure = self._return(list(self._moved.values()))
        if failure is not None:
            raise CourtesyError(self._still_away("this error"), self) from failure

    def _forget(self, moved: Moved) -> None:
        """Let go of one that is back, or whose storage has died."""
        self._moved.pop(id(moved), None)
        if not self._moved:
            _unfinished.discard(self)

    def __enter__(self) -> Self:
        """Move what lies on the device, as ``yield_memory()``.

        Raises:
            CourtesyError: this object is in a block already, or the host has no memory.
        """
        if self._is_entered:
            raise CourtesyError(
                f"{self!r} is in a block already, whose end would bring back what both moved. "
                "Use a second Courtesy.",
                self,
            )
        self.yield_memory()
        self._is_entered = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Bring everything back, as ``restore()``; an exception of the block goes on unmasked."""
        self._is_entered = False
        try:
            self.restore()
        except CourtesyError as error:
            if exc is None:
                raise
            any_use = "the AwayTensorError that any use of these tensors raises"
            is_for_room = error.__cause__ is not None
            # The block's own error comes first; what is still away is said below it.
            exc.add_note(self._still_away(any_use) if is_for_room else str(error))

    def __repr__(self) -> str:
        return f"<Courtesy of {self._where}, {format_bytes(self.away_bytes)} away>"

    # --- leaving

    def _leave(self) -> tuple[list[Moved], CourtesyReport]:
        # what it holds is none of Python's, and could not be moved
        torch.clear_autocast_cache()
        holdings = [held for held in take_inventory() if self._concerns(held.storage.device)]
        devices = list(dict.fromkeys(held.storage.device for held in holdings))
        leavings = [
            prepare(device, [held for held in holdings if held.storage.device == device])
            for device in devices
        ]
        stays = [stay for leaving in leavings for stay in leaving.stays]
        ready = [(one.holding, Moved(self, *one)) for leaving in leavings for one in leaving.ready]
        going = [moved for _, moved in ready]
        self._let_leave(ready)
        # nothing of ours may hold what the program lets go: what is counted now is what it has
        del holdings, leavings, ready
        return going, self._reported(going, stays, devices)

    def _concerns(self, device: torch.device) -> bool:
        mine = self.device
        if mine is None:
            return True
        return device.type == mine.type and mine.index in (None, device.index)

    def _devices_to_leave(self) -> set[torch.device]:
        """The devices that may be meant; a stream that captures is one of the current device."""
        if self.device is not None:
            return {self.device}
        found = torch.accelerator.current_accelerator()
        return set() if found is None else {found}

    def _let_leave(self, ready: list[tuple[Holding, Moved]]) -> None:
        """Let go of device memory whose bytes are on the host now: of all of it or of none."""
        begun: list[Moved] = []
        try:
            for held, moved in ready:
                # Before it leaves: an interrupt in the middle of that must find it.
                begun.append(moved)
                self._moved[id(moved)] = moved
                _unfinished.add(self)
                moved.leave(held)
        except BaseException:
            self._return(begun)
            raise
        for device in {moved.device for moved in begun}:
            # their blocks are the cache's then, and go with it
            clear_workspaces(device)
            module: Any = torch.get_device_module(device)
            if hasattr(module, "empty_cache"):
                module.empty_cache()

    def _reported(
        self, going: list[Moved], stays: list[Stay], devices: list[torch.device]
    ) -> CourtesyReport:
        # Counted after the cache was emptied: it is what other processes can't have.
        left = {str(d): told for d in devices if (told := allocator_bytes(d)) is not None}
        return CourtesyReport(
            moved_bytes=sum(moved.n_bytes for moved in going),
            n_storages=len(going),
            n_tensors=sum(moved.n_tensors for moved in going),
            stays=tuple(stays),
            left_bytes={name: told.allocated for name, told in left.items()},
            left_reserved_bytes={name: told.reserved for name, told in left.items()},
            note="" if devices else self._nothing_there(),
        )

    def _nothing_there(self) -> str:
        if self.device is not None and self.device.type == "cpu":
            return "the memory of the cpu is the memory of the host."
        if not torch.accelerator.is_available():
            return "this machine has no accelerator, and what lies in host memory stays there."
        return f"no tensor that is not away already takes memory of {self._where}."

    # --- returning

    def _return(self, wanted: Iterable[Moved]) -> RuntimeError | None:
        """Bring these back as far as there is room; the error of the first that has none."""
        failure: RuntimeError | None = None
        # All memory first, then all copies: by device, so that the pinned buffers are made once.
        loads: dict[torch.device, list[tuple[UntypedStorage, Tensor]]] = {}
        back: list[Moved] = []
        for moved in wanted:
            try:
                storage, host = moved.allocate(), moved.host
            except RuntimeError as error:
                # its frames hold what is on its way
                error.__traceback__ = None
                failure = failure or error
                # a smaller one may still fit: see test_what_fits_comes_back_past_what_does_not
                continue
            if storage is not None and host is not None:
                loads.setdefault(moved.device, []).append((storage, host))
                back.append(moved)
        for device, on_device in loads.items():
            _staging.to_device(on_device, device)
        for moved in back:
            moved.come_back()
            self._forget(moved)
        return failure

    def _still_away(self, having_it: str) -> str:
        devices = ", ".join(sorted({str(moved.device) for moved in self._moved.values()}))
        return (
            f"{devices} has no memory for {format_bytes(self.away_bytes)} that belong there. They "
            "are safe in host memory. Make room, then call restore() on the Courtesy (the "
            f"attribute courtesy of {having_it}) again."
        )

    @property
    def _where(self) -> str:
        return "every accelerator" if self.device is None else str(self.device)


def _refuse_capture(devices: Iterable[torch.device], done: str, courtesy: Courtesy) -> None:
    """Raise while a graph is captured: a copy would break it, and what it uses must stay.

    Raises:
        CourtesyError: a stream captures.
    """
    for device in devices:
        if is_capturing(device):
            raise CourtesyError(
                f"A graph is being captured on {device}. A copy or a wait would end the capture "
                f"with an error, and what it uses must stay where it is: nothing was {done}. Do it "
                "before the capture begins.",
                courtesy,
            )


def _device(named: str | int | torch.device) -> torch.device:
    try:
        return torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise CourtesyError(
            f"{named!r} is no device that torch knows here, so nothing can leave it. Name one as "
            'torch does, such as "cuda" or "cuda:1"; without any, all accelerators are meant.'
        ) from error


def _warning(report: CourtesyReport) -> str:
    stays = listed([*map(str, report.stays)], _SHOWN, "; ")
    return (
        f"{format_bytes(report.stays_bytes)} could not be moved to host memory: {stays}. "
        "The report of the Courtesy names all."
    )
