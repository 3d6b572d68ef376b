"""Memory reports of all ranks of a process group, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist

from tenure._errors import ProfilerUsageError
from tenure._show import Column, Report, Table
from tenure._text import counted, format_bytes
from tenure._torch.quiet import without_functions

from ._mem_report import UNEXPLAINED, MemReport


@dataclass(frozen=True, slots=True, repr=False)
class GroupReport(Report):
    """The memory of every rank.

    Attributes:
        reports: the report of each rank, by rank within the group.
        rank: the rank that holds this object.
    """

    reports: tuple[MemReport, ...] = field(metadata={"key": "ranks"})
    rank: int

    _figures: ClassVar = ("total_bytes", "unexplained_bytes", "categories")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    @property
    def total_bytes(self) -> int:
        """The totals of all ranks together."""
        return sum(report.total_bytes for report in self.reports)

    @property
    def unexplained_bytes(self) -> int:
        """The unexplained bytes of all ranks together."""
        return sum(report.unexplained_bytes for report in self.reports)

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category over all ranks."""
        by_rank = [report.categories for report in self.reports]
        # some categories are there only where they take something
        names = dict.fromkeys(name for categories in by_rank for name in categories)
        return {name: sum(found.get(name, 0) for found in by_rank) for name in names}

    def __repr__(self) -> str:
        return f"<GroupReport of {self.summary()}>"

    def summary(self) -> str:
        """How many ranks there are, what they take, and which takes the most, in one line."""
        totals = [report.total_bytes for report in self.reports]
        if not totals:
            return "no ranks"
        most = format_bytes(max(totals))
        return (
            f"{counted(len(totals), 'rank')}, {format_bytes(self.total_bytes)}; "
            f"the most on rank {totals.index(max(totals))}: {most}"
        )

    def _parts(self) -> list[Table]:
        ranks = [Column(f"rank {rank}", ">") for rank in range(len(self.reports))]
        rows = [
            _row(name, [report.categories.get(name, 0) for report in self.reports])
            for name, n_bytes in self.categories.items()
            if n_bytes
        ]
        rows.append(_row(UNEXPLAINED, [report.unexplained_bytes for report in self.reports]))
        rows.append(_row("total", [report.total_bytes for report in self.reports]))
        return [Table(self.summary(), [Column("category"), *ranks, Column("all", ">")], rows)]


def _row(name: str, sizes: list[int]) -> tuple[str, ...]:
    return (name, *map(format_bytes, sizes), format_bytes(sum(sizes)))


def gather_reports(report: MemReport, group: dist.ProcessGroup | None) -> GroupReport:
    """Exchange the reports of all ranks; each of them must call it.

    Raises:
        ProfilerUsageError: no process group has been set up.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ProfilerUsageError(
            "A report over ranks needs a process group, and none has been set up. Call "
            "torch.distributed.init_process_group() first, or report() for this process alone."
        )
    gathered: list[MemReport] = [report] * dist.get_world_size(group)
    # The exchange makes tensors of its own, which no override of the program should see.
    with without_functions():
        dist.all_gather_object(gathered, report, group=group)
    return GroupReport(tuple(gathered), dist.get_rank(group))
