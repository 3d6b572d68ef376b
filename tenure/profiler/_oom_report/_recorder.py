"""`record_oom`: a recorder that waits for the first out-of-memory error, and its one-screen report.

Invariant: the program goes on as without it. Its error is the same object, raised on; whatever
fails in here is told in the report, or nowhere.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import ClassVar, Self

from tenure import _host_memory
from tenure._callers import user_site
from tenure._errors import ProfilerUsageError
from tenure._heap import collector_paused
from tenure._oom import OomInfo, chain_of, oom_info
from tenure._registries import handles_ooms
from tenure._reserve import Reserve
from tenure._show import Column, Paragraph, Part, Report, Row, Table, bytes_column, in_bytes
from tenure._text import counted, format_bytes
from tenure._torch.quiet import quietly

from .._owners import CATEGORIES, SAVED, TensorRow, describe_row
from .._reports import place_of
from ._causes import TEXTS, UNKNOWN, judge
from ._facts import Facts
from ._piles import Candidate, holder_name
from ._watch import Watch

# A program may handle thousands of a line: whoever looks for a size that fits does.
_MOST_HANDLED, _MOST_OF_LINE = 8, 2
_NOT_THE_LAST = (
    "Memory ran out again after this. Of errors that the program handles, "
    f"{_MOST_OF_LINE} of a line are explained, and {_MOST_HANDLED} in all. "
    "Use record_oom() as a block, for each piece of work."
)
# What a look at a large heap takes, or as much of it as there is room for.
_RESERVES_BYTES = (64 << 20, 16 << 20, 4 << 20)
_MOST_HOLDERS, _MOST_OF_TEXT = 5, 400
# the attribute of an error that was explained: its report, which has text and numbers alone
_REPORT = "_tenure_oom_report"


class OomRecorder:
    """Waits for an out-of-memory error from the moment that it is made; see `record_oom`.

    Attributes:
        reports: of the first error; and of the last that was explained, if it is another one.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.reports: tuple[OomReport, ...] = ()
        self._quiet = quiet
        self._began_bytes = _host_memory.resident_bytes()
        self._opened_at = str(user_site())
        self._lines: Counter[str] = Counter()
        self._shown: OomReport | None = None
        # whether an error came since the last that was explained
        self._is_behind = False
        self._lock = threading.Lock()
        self._reserve = Reserve(*_RESERVES_BYTES)
        self._watch = Watch(self._saw)
        self._is_open = True
        self._thread_id = threading.get_ident()
        self._reserve.take()
        self._watch.open()

    @property
    def report(self) -> OomReport | None:
        """The last report, which says why the program or the block ended, if an error did.

        None as long as memory has not run out. If memory ran out again without being explained, a
        note says so.
        """
        if not self.reports or not self._is_behind:
            return self.reports[-1] if self.reports else None
        return replace(self.reports[-1], notes=(*self.reports[-1].notes, _NOT_THE_LAST))

    def close(self) -> None:
        """Stop waiting; a second time does nothing.

        Raises:
            ProfilerUsageError: on another thread than it was opened on; nothing changes.
        """
        if not self._is_open:
            return
        if self._thread_id != threading.get_ident():
            raise ProfilerUsageError(
                f"{self!r} was closed on another thread than it was opened on, and stays open. "
                "Close it where it was opened."
            )
        self._is_open = False
        self._watch.close()
        self._reserve.free()

    def __enter__(self) -> Self:
        """Wait to the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop waiting; the block's error, if it is one of memory, is explained, and goes on."""
        if error is not None:
            self._saw(error, True)
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        found = f", {self.report.cause}" if self.report is not None else ""
        return f"<OomRecorder opened at {self._opened_at}, {state}{found}>"

    def _saw(self, error: BaseException, is_final: bool) -> None:
        """Explain an error, if it is one of memory and news."""
        # errors after which tenure tries again are no news
        if not self._is_open or (not is_final and handles_ooms.get()):
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            info = oom_info(error)
            if info is not None:
                self._note(error, info, None if is_final else sys._getframe(1))
        # Memory is short, and the program's objects are any: its own error is what matters.
        except Exception:
            return
        finally:
            self._lock.release()

    def _has_enough(self) -> bool:
        """Return whether errors that the program handles are explained no more."""
        of_line = self._lines[str(user_site())]
        return self._lines.total() >= _MOST_HANDLED or of_line >= _MOST_OF_LINE

    def _note(self, error: BaseException, info: OomInfo, frame: FrameType | None) -> None:
        """Keep the report of the first error, and of the last: what ends the program may be it.

        What happened is best told as it was raised. So the second of a line is explained as well: a
        retry in the midst of the handling of the first.
        """
        # the error of memory, which others may have been raised from
        of_memory = (e for e in chain_of(error) if (i := oom_info(e)) and len(i.chain) == 1)
        root = next(of_memory, error)
        report: OomReport | None = vars(root).get(_REPORT)
        self._is_behind = report is None and frame is not None and self._has_enough()
        if self._is_behind:
            return
        if report is None:
            self._reserve.free()
            try:
                report = self._report_of(error, info, frame)
            finally:
                self._reserve.take()
            # a `MemoryError` has no weak references, and its address is another error's soon
            vars(root)[_REPORT] = report
        first = self.reports[0] if self.reports else report
        self.reports = (first,) if report is first else (first, report)
        if frame is not None:
            self._lines[str(user_site())] += 1
        is_told = frame is None or report is self.reports[0]
        if is_told and report is not self._shown and not self._quiet:
            self._shown = report
            if sys.stderr is not None:
                rule = "-" * 80
                sys.stderr.write(f"{rule}\n{report}\n{rule}\n")
                sys.stderr.flush()

    def _report_of(self, error: BaseException, info: OomInfo, frame: FrameType | None) -> OomReport:
        facts = Facts(info, self._watch, self._began_bytes)
        found = [UNKNOWN]
        with collector_paused(), quietly():
            facts.ask(lambda: facts.look(error, frame), "the error")
            facts.ask(lambda: found.append(judge(facts)), "the cause")
            return build(facts, found[-1])


def record_oom(*, quiet: bool = False) -> OomRecorder:
    """Explain out-of-memory errors as they are raised, and print the first.

    Called alone it waits until the program ends; with ``with`` to the end of the block. An error
    that the program handles is seen as well, while all that it was about is still alive. On the
    thread that calls this every error that torch raises is seen, also in a backward pass, or out of
    the step of an optimizer; of Python, of NumPy and of other threads those that nobody handles.
    Errors after which `tenure.adaptive` tries again by itself are left out.

    Names and remedies come from the source of the program. Without it, or beyond a quarter of a
    million characters, fewer are known, and a list that never grows again may count as a leak.

    Waiting costs one or two microseconds a call of torch, and address space (64 MiB, never touched)
    that the report is made in.

    Args:
        quiet: whether nothing is printed; otherwise the report goes to stderr.

    Returns:
        The recorder; its ``report`` is an `OomReport`, or None.

    Example:
        >>> import torch
        >>> from tenure.adaptive import memory_budget
        >>> from tenure.profiler import record_oom
        >>> def evaluate():
        ...     kept = []
        ...     while True:
        ...         kept.append(torch.ones(64, 1024))
        >>> with record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        ...     try:
        ...         evaluate()
        ...     except torch.OutOfMemoryError:
        ...         pass
        >>> recorder.report.device, recorder.report.total_bytes  # and why, in .first_line
        ('cpu', 8388608)
    """
    return OomRecorder(quiet=quiet)


# --- the report


@dataclass(frozen=True, slots=True)
class OomLine:
    """The storages that one place keeps.

    Attributes:
        name: the place.
        n_bytes: bytes of its storages.
        n_storages: how many there are.
        what: the largest, such as ``float32[64, 128] on cuda:0``.
    """

    name: str
    n_bytes: int
    n_storages: int
    what: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class OomReport(Report):
    """Why memory ran out, and what there was when it did.

    Attributes:
        cause: one of ``"leak"``, ``"results"``, ``"cycle"``, ``"traceback"``, ``"gradients"``,
            ``"logits"``, ``"optimizer_state"``, ``"batch"``, ``"weights"``, ``"fragmentation"``,
            ``"other_process"``, ``"host"``, ``"unknown"``.
        first_line: the cause and the remedy.
        evidence: sentences with the numbers that speak for it, and further remedies.
        error: the type of the error and the beginning of its text.
        site: the user's line that it came from, as ``train.py:41 in loss_of``; can be empty.
        device: where memory ran out.
        requested_bytes: what the allocation asked for; 0 where nothing tells.
        total_bytes: the memory of the device, or the limit on it; None where nothing tells.
        free_bytes: what of it was free; None where nothing tells.
        categories: bytes by category, on that device.
        holders: the places that keep the most.
        fragmentation: ``reserved_bytes``, ``allocated_bytes``, ``unused_bytes`` and
            ``largest_free_bytes`` of the device's allocator; empty where it counts nothing.
        host: the host's memory: that of the process, of its container, and their limits.
        notes: what could not be seen.
    """

    cause: str
    first_line: str
    evidence: tuple[str, ...]
    error: str
    site: str
    device: str
    requested_bytes: int
    total_bytes: int | None
    free_bytes: int | None
    categories: dict[str, int]
    holders: tuple[OomLine, ...]
    fragmentation: dict[str, int]
    host: dict[str, int]
    notes: tuple[str, ...] = ()

    _figures: ClassVar = ("used_bytes",)

    @property
    def used_bytes(self) -> int:
        """The bytes that the tensors that were found take on the device."""
        return sum(self.categories.values())

    def __repr__(self) -> str:
        return f"<OomReport of {self.cause} on {self.device}: {self.first_line}>"

    def _parts(self) -> list[Part]:
        failure = self.error.partition(":")[0]
        failure += f" at {self.site}: {self.device}" if self.site else f": {self.device}"
        if self.requested_bytes:
            failure += f", wanted {format_bytes(self.requested_bytes)}"
        if self.free_bytes is not None:
            failure += f", {format_bytes(self.free_bytes)} free"
        if self.total_bytes:
            of = "" if self.free_bytes is not None else ", limit"
            failure += f"{of} of {format_bytes(self.total_bytes)}"
        # what is below belongs to the first line, and is indented
        told = (f"  {sentence}" for sentence in (f"{failure}.", *self.evidence, *self.notes))
        parts: list[Part] = [Paragraph("", "\n".join([self.first_line, *told, ""]))]
        total = max(1, self.used_bytes)
        used = [(name, in_bytes(n), f"{n / total:.0%}") for name, n in self.categories.items() if n]
        tables: list[tuple[tuple[str, ...], Sequence[Row]]] = [
            (("in use", self.device, "share"), used),
            (("kept by", "bytes", "tensors"), list(map(_cells, self.holders))),
            (("allocator", "bytes"), _sizes(self.fragmentation)),
            (("host", "bytes"), _sizes(self.host)),
        ]
        for (name, n_bytes, *others), rows in tables:
            if rows:
                columns = (Column(name), bytes_column(n_bytes), *map(Column, others))
                parts.append(Table("", columns, rows, by=n_bytes, rule=""))
        return parts


def build(facts: Facts, cause: Candidate) -> OomReport:
    """Put what is known and what is thought of it together; without a reference to anything."""
    info = facts.info
    label, advice = TEXTS[cause.cause]
    share = f"That is {cause.n_bytes / max(1, facts.used_bytes):.0%} of what was in use."
    is_told = 0 < cause.n_bytes <= facts.used_bytes
    names = dict.fromkeys([*CATEGORIES, *(entry.owner.category for entry in facts.entries)])
    return OomReport(
        cause.cause,
        label + cause.text,
        tuple(filter(None, (share if is_told else "", advice))),
        f"{info.chain[-1]}: {info.text[:_MOST_OF_TEXT]}",
        facts.site,
        facts.device,
        facts.wanted_bytes,
        facts.total_bytes,
        facts.free_bytes,
        {name: facts.bytes_of(name) for name in names},
        _holders(facts)[:_MOST_HOLDERS],
        facts.fragmentation,
        facts.host,
        tuple(facts.notes),
    )


def _holders(facts: Facts) -> tuple[OomLine, ...]:
    """Return all tensors by the place that keeps them, the largest first."""
    by_name: defaultdict[str, list[TensorRow]] = defaultdict(list)
    # the largest of a name is the first
    for row in sorted((entry.owner for entry in facts.entries), key=lambda row: -row.n_bytes):
        place = place_of(holder_name(row, facts))
        is_saved = row.graph is not None and row.category == SAVED
        by_name[f"graph of {place}" if is_saved else place].append(row)
    lines = (
        OomLine(name, sum(row.n_bytes for row in rows), len(rows), describe_row(rows[0]))
        for name, rows in by_name.items()
    )
    return tuple(sorted(lines, key=lambda line: -line.n_bytes))


def _cells(line: OomLine) -> Row:
    n = counted(line.n_storages, "tensor") if line.n_storages > 1 else line.what
    return line.name, in_bytes(line.n_bytes), n


def _sizes(sizes: dict[str, int]) -> list[Row]:
    named = {key.removesuffix("_bytes").replace("_", " "): n for key, n in sizes.items()}
    return [(name, in_bytes(n)) for name, n in named.items()]
