"""Lending a device to others: what the program holds there waits in host memory, and comes back.

Until every byte has been copied nothing is changed; from then on a storage is away until its bytes
are back, one by one. So whatever goes wrong at whatever point, nothing is lost and ``restore()``
can be called again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, UntypedStorage

from tenure._callers import warn_user
from tenure._errors import CourtesyError, CourtesyWarning
from tenure._graph_capture import is_capturing, kind_of_live_graph
from tenure._host_memory import free_host_bytes
from tenure._show import Paragraph, Part, Report
from tenure._text import counted, format_bytes, listed
from tenure._torch.device_allocator import clear_workspaces
from tenure._torch.quiet import aside

from ._away import Away, all_away, bytes_in, settled
from ._inventory import Holding, Stay, split, take_inventory

# one at a time: two that move the same storage would each think that the other's bytes are its own
_turn = RLock()
_SHOWN = 3
_NOTHING = (
    "Courtesy moved nothing: no tensor that is not away already takes memory of the accelerators "
    "that were asked for, and memory of the host never moves."
)


@dataclass(frozen=True, slots=True)
class CourtesyReport(Report):
    """The memory of accelerators that was moved, and that stayed; ``print`` shows it.

    Attributes:
        moved_bytes: bytes that are in host memory now.
        n_storages: storages that they are the bytes of.
        n_tensors: tensors that share these storages, those that only a graph holds among them.
        stays: what stayed on its device although a tensor of the program has it.
    """

    moved_bytes: int
    n_storages: int
    n_tensors: int
    stays: tuple[Stay, ...] = ()

    _figures: ClassVar = ("stays_bytes",)

    @property
    def stays_bytes(self) -> int:
        """Bytes of all that stayed."""
        return sum(stay.n_bytes for stay in self.stays)

    def _parts(self) -> list[Part]:
        if not self.n_storages and not self.stays:
            return [Paragraph("", _NOTHING)]
        lines = [
            f"Courtesy moved {format_bytes(self.moved_bytes)} to host memory "
            f"({counted(self.n_storages, 'storage')}, {counted(self.n_tensors, 'tensor')})."
        ]
        if self.stays:
            lines.append(f"{format_bytes(self.stays_bytes)} stay where they are:")
            lines += [f"  {stay}" for stay in self.stays]
        return [Paragraph("", "\n".join(lines))]


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

    @property
    def away_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(away.n_bytes for _, away in self._all_away())

    def _all_away(self) -> list[tuple[UntypedStorage, Away]]:
        return [entry for entry in list(all_away.items()) if entry[1].courtesy is self]

    def yield_memory(self) -> CourtesyReport:
        """Move what lies on the device to host memory; what is away already stays away.

        Returns:
            What was moved and what stayed.

        Raises:
            CourtesyError: nothing was moved: the host has no memory for it, a graph is being
                captured, or was and is alive, or torch can't empty storages of the device.

        Warns:
            CourtesyWarning: some of it can't be moved.
        """
        with _turn, aside():
            # what its cache holds is none of Python's, and could not be moved
            torch.clear_autocast_cache()
            here = [held for held in take_inventory() if self._concerns(held.storage.device)]
            devices = list(dict.fromkeys(held.storage.device for held in here))
            self._refuse_capture(devices, "moved to host memory")
            self._refuse_what_stays(devices)
            going, stays = split(here)
            # Before anything is moved: the warning may be an error to this program.
            if stays:
                warn_user(
                    f"{format_bytes(sum(stay.n_bytes for stay in stays))} could not be moved to "
                    f"host memory: {listed([*map(str, stays)], _SHOWN, '; ')}. The report of the "
                    "Courtesy names all.",
                    CourtesyWarning,
                )
            moved = self._let_leave(going)
            for device in {away.device for away in moved}:
                # their blocks are the cache's then, and go with it
                clear_workspaces(device)
                module: Any = torch.get_device_module(device)
                if hasattr(module, "empty_cache"):
                    module.empty_cache()
            self.report = CourtesyReport(
                moved_bytes=sum(away.n_bytes for away in moved),
                n_storages=len(moved),
                n_tensors=sum(away.n_tensors for away in moved),
                stays=tuple(stays),
            )
        return self.report

    def restore(self) -> None:
        """Bring back what is away; tensors that have died meanwhile are left out.

        Raises:
            CourtesyError: a device has no memory for all of it. The rest stays in host memory, and
                another call brings it back once there is room. Or a graph is being captured, and
                nothing was brought back.
        """
        with _turn, aside():
            self._refuse_capture({away.device for _, away in self._all_away()}, "brought back")
            for storage, away in self._all_away():
                with settled(away.device):
                    try:
                        away.allocate(storage)
                    except RuntimeError as error:
                        left = [each for _, each in self._all_away()]
                        n_bytes = sum(e.n_bytes for e in left if e.device == away.device)
                        raise CourtesyError(
                            f"{away.device} has no memory for {format_bytes(n_bytes)} that "
                            "belong there. They are safe in host memory. Make room, then call "
                            "restore() on the Courtesy again: it is the attribute courtesy of a "
                            "CourtesyError, as any use of these tensors raises one.",
                            self,
                        ) from error
                    away.come_back(storage)

    def __enter__(self) -> Self:
        """Move what lies on the device, as ``yield_memory()``.

        Raises:
            CourtesyError: this object has moved something already, or as of ``yield_memory()``.
        """
        if self._all_away():
            raise CourtesyError(
                f"{self!r} has moved that already, and the end of this block would bring it back "
                "as well. Call its restore() first, or use a second Courtesy.",
                self,
            )
        self.yield_memory()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Bring everything back, as ``restore()``; an exception of the block goes on unmasked."""
        try:
            self.restore()
        except CourtesyError as error:
            if exc is None:
                raise
            # The block's own error comes first; what is still away is said below it.
            exc.add_note(str(error))

    def __repr__(self) -> str:
        where = self.device or "every accelerator"
        return f"<Courtesy of {where}, {format_bytes(self.away_bytes)} away>"

    # --- leaving

    def _concerns(self, device: torch.device) -> bool:
        mine = self.device
        if mine is None:
            return True
        return device.type == mine.type and mine.index in (None, device.index)

    def _refuse_capture(self, devices: Iterable[torch.device], done: str) -> None:
        """Raise while a graph is captured: a copy would break it, and what it uses must stay.

        Raises:
            CourtesyError: a stream captures.
        """
        for device in filter(is_capturing, devices):
            raise CourtesyError(
                f"A graph is being captured on {device}. A copy or a wait would end the capture "
                f"with an error, and what it uses must stay where it is: nothing was {done}. Do it "
                "before the capture begins.",
                self,
            )

    def _refuse_what_stays(self, devices: Iterable[torch.device]) -> None:
        """Raise if nothing of a device can leave it.

        Raises:
            CourtesyError: a captured graph is alive, or storages can't be resized.
        """
        for device in devices:
            if graph := kind_of_live_graph(device):
                raise CourtesyError(
                    f"A live {graph} replays on the addresses of {device} that it was captured "
                    "with: nothing was moved. Let go of the graph first.",
                    self,
                )
            try:
                # Tried on an empty one: a list of backends would be out of date.
                torch.empty(0, device=device).untyped_storage().resize_(0)
            except RuntimeError as error:
                raise CourtesyError(
                    f"torch can't empty a storage of {device}, and fill it again, in place: "
                    "nothing was moved.",
                    self,
                ) from error

    def _let_leave(self, going: list[Holding]) -> list[Away]:
        """Copy all bytes, then free the device memory: all of it or none."""
        hosts = _host_memory(going)
        for host, held in zip(hosts, going, strict=True):
            with settled(held.storage.device):
                host.copy_(bytes_in(held.storage))
        moved = [Away(self, held, host) for held, host in zip(going, hosts, strict=True)]
        try:
            for away, held in zip(moved, going, strict=True):
                away.leave(held)
        except BaseException:
            self.restore()
            raise
        return moved


def _device(named: str | int | torch.device) -> torch.device:
    try:
        return torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise CourtesyError(
            f"{named!r} is no device that torch knows here, so nothing can leave it. Name one as "
            'torch does, such as "cuda" or "cuda:1"; without any, all accelerators are meant.'
        ) from error


def _host_memory(going: list[Holding]) -> list[Tensor]:
    """uint8[n_bytes] for each storage, before the first copy: without room nothing has happened.

    Raises:
        CourtesyError: the host has no memory for them.
    """
    sizes = [held.storage.nbytes() for held in going]
    # Linux grants memory that it does not have, and kills the process that writes to it.
    if sum(sizes) > free_host_bytes():
        devices = ", ".join(sorted({str(held.storage.device) for held in going}))
        raise CourtesyError(
            f"{format_bytes(sum(sizes))} on {devices} don't fit in the memory of the host: "
            f"{format_bytes(free_host_bytes())} are free. Nothing was moved. Let go of tensors "
            "first, or name one device of several."
        )
    return [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
