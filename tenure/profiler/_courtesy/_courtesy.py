"""Lending a device to others: what the program holds there waits in host memory, and comes back.

Until every byte has been copied nothing is changed; from then on a storage is away until its bytes
are back, one by one. So whatever goes wrong at whatever point, nothing is lost and ``restore()``
can be called again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from tenure._torch.quiet import quietly

from .._allocator import allocator_bytes
from ._away import Away
from ._inventory import Holding, Stay, split, take_inventory

# one at a time: two that move the same storage would each think that the other's bytes are its own
_turn = RLock()
# what is away must come back, even if the program has dropped the object that can bring it back
_unfinished: set[Courtesy] = set()
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class CourtesyReport(Report):
    """The memory of accelerators that was moved, and that stayed; ``print`` shows it.

    Attributes:
        moved_bytes: bytes that are in host memory now.
        n_storages: storages that they are the bytes of.
        n_tensors: tensors that share these storages, those that only a graph holds among them.
        stays: what stayed on its device although a tensor of the program has it.
        left_bytes: by device, what its allocator still counts as allocated; without statistics
            the device is missing.
        left_reserved_bytes: by device, what its allocator still keeps from other processes.
        note: why there was nothing to move; else empty.
    """

    moved_bytes: int
    n_storages: int
    n_tensors: int
    stays: tuple[Stay, ...] = ()
    left_bytes: Mapping[str, int] = field(default_factory=dict)
    left_reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    _figures: ClassVar = ("stays_bytes",)

    @property
    def stays_bytes(self) -> int:
        """Bytes of all that stayed."""
        return sum(stay.n_bytes for stay in self.stays)

    def _parts(self) -> list[Part]:
        if self.note:
            return [Paragraph("", f"Courtesy moved nothing: {self.note}")]
        lines = [
            f"Courtesy moved {format_bytes(self.moved_bytes)} to host memory "
            f"({counted(self.n_storages, 'storage')}, {counted(self.n_tensors, 'tensor')})."
        ]
        if self.stays:
            lines.append(f"{format_bytes(self.stays_bytes)} stay where they are:")
            lines += [f"  {stay}" for stay in self.stays]
        for device, allocated_bytes in self.left_bytes.items():
            reserved_bytes = self.left_reserved_bytes.get(device, allocated_bytes)
            reserved = f", and {format_bytes(reserved_bytes)} reserved"
            lines.append(
                f"{device} has {format_bytes(allocated_bytes)} allocated"
                f"{reserved if reserved_bytes != allocated_bytes else ''} now."
            )
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
        self._away: dict[int, Away] = {}
        self._is_entered = False

    @property
    def away_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(away.n_bytes for away in list(self._away.values()))

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
        with _turn, quietly():
            # what its cache holds is none of Python's, and could not be moved
            torch.clear_autocast_cache()
            here = [held for held in take_inventory() if self._concerns(held.storage.device)]
            devices = list(dict.fromkeys(held.storage.device for held in here))
            self._refuse_capture(devices, "moved to host memory")
            self._refuse_what_stays(devices)
            going, stays = split(here)
            here.clear()
            # Before anything is moved: the warning may be an error to this program.
            if stays:
                warn_user(_warning(stays), CourtesyWarning)
            moved = self._let_leave(going)
            # no reference of ours to what the program may free
            going.clear()
            self.report = self._reported(moved, stays, devices)
        return self.report

    def restore(self) -> None:
        """Bring back what is away; tensors that have died meanwhile are left out.

        Raises:
            CourtesyError: a device has no memory for all of it. The rest stays in host memory, and
                another call brings it back once there is room. Or a graph is being captured, and
                nothing was brought back.
        """
        with _turn, quietly():
            self._refuse_capture({away.device for away in self._away.values()}, "brought back")
            failure = self._return(list(self._away.values()))
        if failure is not None:
            raise CourtesyError(self._still_away(), self) from failure

    def _forget(self, away: Away) -> None:
        """Drop one that is back, or whose storage has died."""
        self._away.pop(id(away), None)
        if not self._away:
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
            # The block's own error comes first; what is still away is said below it.
            exc.add_note(str(error))

    def __repr__(self) -> str:
        return f"<Courtesy of {self._where}, {format_bytes(self.away_bytes)} away>"

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
        _copy([(host, held.storage) for host, held in zip(hosts, going, strict=True)], to_host=True)
        begun: list[Away] = []
        try:
            for held, host in zip(going, hosts, strict=True):
                # Before it leaves: an interrupt in the middle of that must find it.
                begun.append(Away(self, held, host))
                self._away[id(begun[-1])] = begun[-1]
                _unfinished.add(self)
                begun[-1].leave(held)
        except BaseException:
            self._return(begun)
            raise
        return begun

    def _reported(
        self, moved: list[Away], stays: list[Stay], devices: list[torch.device]
    ) -> CourtesyReport:
        for device in {away.device for away in moved}:
            # their blocks are the cache's then, and go with it
            clear_workspaces(device)
            module: Any = torch.get_device_module(device)
            if hasattr(module, "empty_cache"):
                module.empty_cache()
        nothing = (
            f"no tensor that is not away already takes memory of {self._where}, and memory of the "
            "host never moves."
        )
        # Counted after the cache was emptied: it is what other processes can't have.
        left = {str(d): told for d in devices if (told := allocator_bytes(d)) is not None}
        return CourtesyReport(
            moved_bytes=sum(away.n_bytes for away in moved),
            n_storages=len(moved),
            n_tensors=sum(away.n_tensors for away in moved),
            stays=tuple(stays),
            left_bytes={name: told.allocated for name, told in left.items()},
            left_reserved_bytes={name: told.reserved for name, told in left.items()},
            note="" if devices else nothing,
        )

    # --- returning

    def _return(self, wanted: Iterable[Away]) -> RuntimeError | None:
        """Bring these back as far as there is room; the error of the first that has none."""
        failure: RuntimeError | None = None
        back: list[tuple[Away, Tensor, UntypedStorage]] = []
        for away in wanted:
            try:
                with _on_default_stream(away.device):
                    storage, host = away.allocate(), away.host
            except RuntimeError as error:
                # its frames hold what is on its way
                error.__traceback__ = None
                failure = failure or error
                # a smaller one may still fit: see test_what_fits_comes_back_past_what_does_not
                continue
            if storage is not None and host is not None:
                back.append((away, host, storage))
        _copy([(host, storage) for _, host, storage in back], to_host=False)
        for away, _, _ in back:
            away.come_back()
            self._forget(away)
        return failure

    def _still_away(self) -> str:
        devices = ", ".join(sorted({str(away.device) for away in self._away.values()}))
        return (
            f"{devices} has no memory for {format_bytes(self.away_bytes)} that belong there. They "
            "are safe in host memory. Make room, then call restore() on the Courtesy again: it is "
            "the attribute courtesy of a CourtesyError, as any use of these tensors raises one."
        )

    @property
    def _where(self) -> str:
        return "every accelerator" if self.device is None else str(self.device)


def _device(named: str | int | torch.device) -> torch.device:
    try:
        return torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise CourtesyError(
            f"{named!r} is no device that torch knows here, so nothing can leave it. Name one as "
            'torch does, such as "cuda" or "cuda:1"; without any, all accelerators are meant.'
        ) from error


def _warning(stays: list[Stay]) -> str:
    n_bytes = sum(stay.n_bytes for stay in stays)
    return (
        f"{format_bytes(n_bytes)} could not be moved to host memory: "
        f"{listed([*map(str, stays)], _SHOWN, '; ')}. The report of the Courtesy names all."
    )


# --- bytes


def _host_memory(going: list[Holding]) -> list[Tensor]:
    """uint8[n_bytes] for each storage, before the first copy: without room nothing has happened.

    Raises:
        CourtesyError: the host has no memory for them.
    """
    sizes = [held.storage.nbytes() for held in going]
    # Linux grants memory that it does not have, and kills the process that writes to it.
    why = f"{format_bytes(free_host_bytes())} are free"
    if sum(sizes) <= free_host_bytes():
        try:
            with torch.inference_mode(False):
                return [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        except (RuntimeError, MemoryError):
            why = "an allocation failed"
    devices = ", ".join(sorted({str(held.storage.device) for held in going}))
    raise CourtesyError(
        f"{format_bytes(sum(sizes))} on {devices} don't fit in the memory of the host: {why}. "
        "Nothing was moved. Let go of tensors first, or name one device of several."
    )


def _copy(loads: list[tuple[Tensor, UntypedStorage]], *, to_host: bool) -> None:
    """Copy bytes after all other work of the devices, and wait until they have arrived."""
    devices = {storage.device for _, storage in loads}
    with torch.inference_mode(False), torch.no_grad():
        _wait_for(devices)
        for host, storage in loads:
            empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
            there: Tensor = empty.set_(storage)
            _ = host.copy_(there) if to_host else there.copy_(host)
        _wait_for(devices)


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """A context in which memory is allocated for the default stream, from which all of it came."""
    module: Any = torch.get_device_module(device)
    with ExitStack() as stack:
        if hasattr(module, "default_stream"):
            # Else the end of stream() turns to the device that was current, and makes a context.
            stack.enter_context(module.device(device.index))
            stack.enter_context(module.stream(module.default_stream(device)))
        yield
