"""Which records of a leak report read better as one line: what autograd saved in one graph.

Grouping is for the eye only: no record is dropped or altered, and a record with any other holder
stands by itself.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenure._text import format_bytes

if TYPE_CHECKING:
    from ._leaks import LeakRecord


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Two or more tensors that nothing but one graph holds.

    Attributes:
        records: the records, in the order of creation.
        is_rooted: the tensor whose graph it is stands above in the report.
    """

    records: "tuple[LeakRecord, ...]"
    is_rooted: bool

    def __str__(self) -> str:
        lead = "and " if self.is_rooted else ""
        largest = f"the largest {self.largest.line()}"
        return f"{lead}{self.summary()}, in the graph of {self.graph}; {largest}"

    @property
    def graph(self) -> str:
        """What holds the graph."""
        return self.records[0].graph

    @property
    def largest(self) -> "LeakRecord":
        """The record with the most bytes; of several, the first."""
        return max(self.records, key=lambda record: record.nbytes)

    def summary(self) -> str:
        """How many tensors there are, and their bytes."""
        n_bytes = sum(record.nbytes for record in self.records)
        return f"{len(self.records)} tensors that autograd saved, {format_bytes(n_bytes)}"


def grouped(records: "Iterable[LeakRecord]") -> "list[LeakRecord | SavedTensors]":
    """The records in their order, each followed by what its graph saved.

    A graph whose own tensor is not among the records stands where the first of its tensors was.
    """
    records = tuple(records)
    saved: defaultdict[str, list[LeakRecord]] = defaultdict(list)
    for record in records:
        if record.graph:
            saved[record.graph].append(record)
    groups = {graph: tuple(found) for graph, found in saved.items() if len(found) > 1}
    single = [record for record in records if record.graph not in groups]
    roots = {chain: record for record in reversed(single) for chain in record.holders}
    rows: list[LeakRecord | SavedTensors] = []
    for record in records:
        if record.graph not in groups:
            rows.append(record)
            rooted = [
                groups[chain]
                for chain in record.holders
                if roots[chain] is record and chain in groups
            ]
            rows.extend(SavedTensors(group, is_rooted=True) for group in rooted)
        elif record.graph not in roots and record is groups[record.graph][0]:
            rows.append(SavedTensors(groups[record.graph], is_rooted=False))
    return rows
