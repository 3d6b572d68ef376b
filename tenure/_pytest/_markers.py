"""What the markers of a test ask: how much its tensors take at most, and that none outlives it."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import iscoroutinefunction
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self
from unittest import TestCase

import pytest

from tenure import NewDisposeScope
from tenure._errors import ByteSizeError, ProfilerUsageError
from tenure._text import format_bytes, parse_bytes
from tenure.profiler import DeviceTimeline, Timeline
from tenure.scopes import LeakReport

_log = logging.getLogger("tenure.scopes")
_MOST_ROWS = 5
# where pytest has the object that a method of a test class, or of a TestCase, is called on
_OF_SELF = ".item._instance."


class MeasuredPeak(NamedTuple):
    """The most that the tensors of a test took.

    Attributes:
        device: the device on which they took the most.
        n_bytes: bytes above what was in use before the test.
        rows: what was in use then and made by the test: bytes, category and line, the largest
            first.
    """

    device: str
    n_bytes: int
    rows: list[tuple[int, str, str]]

    def facts(self) -> dict[str, Any]:
        """Return what a report of the test carries, also from another process."""
        line = self.rows[0][-1] if self.rows else ""
        return {"n_bytes": self.n_bytes, "text": format_bytes(self.n_bytes), "line": line}


def limit_of(marker: pytest.Mark) -> int:
    """Return the bytes that a marker allows; a marker that says none fails the test."""
    sizes = [*marker.args, *marker.kwargs.values()]
    if len(sizes) != 1 or set(marker.kwargs) - {"size"}:
        _refuse(marker, " takes one size, as in limit_tensor_memory('24 MB')")
    try:
        return parse_bytes(sizes[0])
    except ByteSizeError as error:
        told = str(error)
    # after it: what is raised within has it beside itself
    _refuse(marker, f": {told}")


def check_no_arguments(marker: pytest.Mark) -> None:
    """Fail the test whose marker has arguments that nothing reads."""
    if marker.args or marker.kwargs:
        _refuse(marker, " takes no arguments")


def _refuse(marker: pytest.Mark, text: str) -> NoReturn:
    given = [repr(each) for each in marker.args]
    given += [f"{name}={value!r}" for name, value in marker.kwargs.items()]
    pytest.fail(f"@pytest.mark.{marker.name}({', '.join(given)}){text}", pytrace=False)


class _TimelineOfTest(Timeline):
    """What was in use before a test does not count, and so the test gains nothing by freeing it."""

    _keeps_before = True


class WatchedBlock:
    """A block in which a test runs.

    Attributes:
        peak: what its tensors took at most, once it has ended; None where nobody asked.
    """

    def __init__(self, *, is_measured: bool, finds_leaks: bool, name: str) -> None:
        self._timeline = _TimelineOfTest() if is_measured else None
        self._scope = NewDisposeScope(name, policy="report") if finds_leaks else None
        self._open = ExitStack()
        self.peak: MeasuredPeak | None = None

    def __enter__(self) -> Self:
        for block in (self._timeline, self._scope):
            if block is not None:
                self._open.enter_context(block)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # the failure tells of it, so the log need not
        _log.addFilter(_is_no_leak)
        try:
            self._open.__exit__(exc_type, exc, traceback)
        finally:
            _log.removeFilter(_is_no_leak)
        if self._timeline is not None:
            try:
                devices = self._timeline.report.devices
            # it told of that in a note, and the test's own failure is what matters
            except ProfilerUsageError:
                return
            self.peak = max(map(_peak_of, devices), key=lambda p: p.n_bytes)

    def check(self, most_bytes: int | None) -> None:
        """Fail the test that took more than it may, or whose tensors are still held."""
        texts = []
        if self.peak is not None and most_bytes is not None and self.peak.n_bytes > most_bytes:
            texts.append(_too_much(self.peak, most_bytes))
        if self._scope is not None and (leaks := _outliving(self._scope.leaks)):
            texts.append(str(leaks))
        if texts:
            pytest.fail("\n\n".join(texts), pytrace=False)


@contextmanager
def opened(block: WatchedBlock, item: Any) -> Iterator[None]:
    """Open the block around a test: if that is a coroutine, as it begins.

    A runner may run it in a context that is older than the test, in which no scope is current that
    is opened here: unittest does so, and anyio with fixtures that are coroutines.
    """
    body, thread, unopened = getattr(item, "obj", None), get_ident(), [block]
    with ExitStack() as stack:
        if iscoroutinefunction(body):

            @functools.wraps(body)
            async def run(*args: Any, **kwargs: Any) -> Any:
                # of one thread, and for one block: Django runs coroutines on another thread
                if unopened and get_ident() == thread:
                    stack.enter_context(unopened.pop())
                return await body(*args, **kwargs)

            item.obj = run
            stack.callback(setattr, item, "obj", body)
            # unittest asks the case, and not the item, for the method
            if isinstance(item.instance, TestCase):
                setattr(item.instance, item.name, run)
                stack.callback(delattr, item.instance, item.name)
        else:
            stack.enter_context(block)
        yield


def _outliving(leaks: LeakReport | None) -> LeakReport | None:
    """Leave out what `self` of a test alone holds: that object is for this test, and goes next."""
    if not leaks:
        return None
    of_test = [bool(each.holders) and all(_OF_SELF in h for h in each.holders) for each in leaks]
    kept = [each for each, is_of_test in zip(leaks, of_test, strict=True) if not is_of_test]
    return LeakReport(tuple(kept), scope=leaks.scope)


def _is_no_leak(record: logging.LogRecord) -> bool:
    return not (
        isinstance(record.args, tuple) and isinstance(next(iter(record.args), None), LeakReport)
    )


def _peak_of(device: DeviceTimeline) -> MeasuredPeak:
    found: Counter[tuple[str, str]] = Counter()
    for row in device.at_peak:
        # what was there before is none of the test's
        if row.stack and not row.was_before:
            found[row.category, row.stack[-1]] += row.n_bytes
    rows = sorted(((n_bytes, *key) for key, n_bytes in found.items()), reverse=True)
    return MeasuredPeak(device.device, device.peak_bytes - device.began_bytes, rows)


def _too_much(peak: MeasuredPeak, most_bytes: int) -> str:
    took, limit = format_bytes(peak.n_bytes), format_bytes(most_bytes)
    if took == limit:
        took, limit = f"{peak.n_bytes:,} B", f"{most_bytes:,} B"
    lines = [
        f"the tensors of the test took {took} on {peak.device}, and {limit} is its limit; at the "
        "peak:"
    ]
    for n_bytes, category, line in peak.rows[:_MOST_ROWS]:
        lines.append(f"  {format_bytes(n_bytes):>10}  {category}, made at {line}")
    return "\n".join(lines)
