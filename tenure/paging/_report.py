"""What a pass moved and waited for, set against what the link and the device allow.

Invariant: every figure is measured, by the device's own events; nothing is estimated from a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tenure._cuda_blocks import whole_block_bytes
from tenure._errors import PagingError
from tenure._show import Paragraph, Part, Report
from tenure._text import counted, format_bytes

from ._engine import Engine

Bound = Literal["link", "compute"]
_NAMES = {"link": "link", "compute": "computation"}


@dataclass(frozen=True, slots=True)
class PagingReport(Report):
    """The last pass of a paged model.

    Attributes:
        passes: how many passes have run.
        pass_s: how long the last one took on the device.
        stall_s: how much of it computation waited for copies.
        compute_s: the rest.
        bytes_per_pass: what was copied to the device for it.
        link_bytes_per_s: how fast the copies ran.
        faults: units that were fetched only when they were used.
        total_faults: in all passes.
        share_of_limit: the least time that a pass can take, ``max((W-R)/BW, C)``, by what it took.
        bound: what sets that limit, ``"link"`` or ``"compute"``.
        helpful_budget_bytes: the budget at which computation would take as long as the copies;
            None where it does already.
        resident_bytes: what stays on the device, with what the rounding of the allocator leaves
            over.
        ring_bytes: the room that the rest passes through.
        allocated_bytes: both: what paging takes of the device now.
        reserved_bytes: the memory of the device that goes for it, as in the plan.
        staging_bytes: host memory between files and the device.
        host_bytes: the host memory that holds the weights.
        pinned_bytes: how much of these last two is pinned; copies from the rest are slower, and
            wait.
    """

    passes: int
    pass_s: float
    stall_s: float
    compute_s: float
    bytes_per_pass: int
    link_bytes_per_s: float
    faults: int
    total_faults: int
    share_of_limit: float
    bound: Bound
    helpful_budget_bytes: int | None
    resident_bytes: int
    ring_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    staging_bytes: int
    host_bytes: int
    pinned_bytes: int

    def _parts(self) -> list[Part]:
        helpful = self.helpful_budget_bytes
        pageable_bytes = self.host_bytes + self.staging_bytes - self.pinned_bytes
        not_pinned = f", of which {format_bytes(pageable_bytes)} not pinned"
        lines = [
            f"pass {self.passes}: {self.pass_s * 1e3:.3f} ms, {self.share_of_limit:.1%} of the "
            f"limit, bound by the {_NAMES[self.bound]}",
            f"  moved      {format_bytes(self.bytes_per_pass)} at "
            f"{self.link_bytes_per_s / 1e9:.1f} GB/s, {counted(self.faults, 'fault')} "
            f"({self.total_faults} in all passes)",
            f"  computed   {self.compute_s * 1e3:.3f} ms, waited {self.stall_s * 1e3:.3f} ms",
            f"  device     {format_bytes(self.resident_bytes)} stay, "
            f"{format_bytes(self.ring_bytes)} to pass through",
            *self._taken_lines(),
            f"  host       {format_bytes(self.host_bytes)}{not_pinned if pageable_bytes else ''}",
        ]
        if helpful is not None:
            lines.append(f"  a budget of {format_bytes(helpful)} would hide the copies")
        return [Paragraph("", "\n".join(lines))]

    def _taken_lines(self) -> Iterator[str]:
        # Equal where the allocator rounds nothing; then the line would repeat the one above.
        if self.reserved_bytes != self.resident_bytes + self.ring_bytes:
            yield (
                f"  takes      {format_bytes(self.allocated_bytes)}, in "
                f"{format_bytes(self.reserved_bytes)} that the allocator reserves"
            )


def make_report(engine: Engine, weight_bytes: int) -> PagingReport:
    """Read the events of the last pass.

    Args:
        engine: the pages of the model.
        weight_bytes: all that stays or passes.

    Raises:
        PagingError: no pass has ended.
    """
    taken = engine.taken
    record = engine.measured()
    if record is None or record.span is None:
        raise PagingError("There is nothing to report yet: call the model first.")
    whole_s, compute_s = record.whole_s, record.compute_s
    copy_s, link_bytes_per_s = record.copy_s, record.link_bytes_per_s
    # Copies and computation run side by side, so the longer of them is the least that a pass takes.
    limit_s = max(copy_s, compute_s)
    return PagingReport(
        passes=engine.meter.passes,
        pass_s=whole_s,
        stall_s=record.stall_s,
        compute_s=compute_s,
        bytes_per_pass=record.copied_bytes,
        link_bytes_per_s=link_bytes_per_s,
        faults=record.faults,
        total_faults=engine.meter.total_faults,
        share_of_limit=min(1.0, limit_s / whole_s) if whole_s else 1.0,
        bound="link" if copy_s > compute_s else "compute",
        helpful_budget_bytes=_helpful_bytes(
            whole_block_bytes(weight_bytes, engine.device),
            weight_bytes - engine.room.staying_bytes,
            engine.room.ring_bytes,
            compute_s * link_bytes_per_s,
        ),
        resident_bytes=engine.room.resident_bytes,
        ring_bytes=engine.room.ring_bytes,
        allocated_bytes=taken.allocated_bytes,
        reserved_bytes=taken.reserved_bytes,
        staging_bytes=engine.staging_bytes,
        host_bytes=engine.host_bytes,
        pinned_bytes=engine.pinned_bytes,
    )


def _helpful_bytes(
    most_bytes: int, passing_bytes: int, ring_bytes: int, hidden_bytes: float
) -> int | None:
    """Return a ring, and what has to stay for the rest to be copied while the device computes."""
    # Copies hide behind computation already.
    if passing_bytes <= hidden_bytes:
        return None
    # More than all of the weights never helps.
    return min(most_bytes, int(most_bytes - hidden_bytes) + ring_bytes)
