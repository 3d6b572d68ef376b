"""What is measured while a program runs: each option of ``tenure run`` is an instrument.

Each begins when the program has imported torch, and not before: a program says by the environment
how torch is to be set up, and one without torch is never made to import it.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import nullcontext, suppress
from dataclasses import replace
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from ._instrument import Instrument
from ._leaks import Leaks

if TYPE_CHECKING:
    from tenure.adaptive import memory_budget
    from tenure.profiler import LineProfiler, MemReport, Snapshot

MAIN = "__main__"
_MOST_ROWS = 2000
_SHORT_OF_MEMORY = "what was alive at the end could not be told: too little memory was left"


class Budget(Instrument):
    """``--budget``: the program can hold only so much.

    Args:
        n_bytes: the limit.
    """

    option = "--budget"
    is_of_one_thread = True

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self._n_bytes = n_bytes
        self._thread = 0
        self._budget: memory_budget | None = None
        self._is_open = False

    def begin(self) -> None:
        import torch

        from tenure.adaptive import memory_budget

        device = torch.accelerator.current_accelerator(check_available=True)
        self._budget = memory_budget(self._n_bytes, "cpu" if device is None else device)
        self._budget.__enter__()
        self._thread, self._is_open = get_ident(), True

    def end(self, error: BaseException | None) -> None:
        # a child may be forked on another thread
        if self._budget is not None and self._is_open and self._thread == get_ident():
            self._is_open = False
            # whatever else the program left open is no error of it
            with suppress(Exception):
                self._budget.__exit__(None, None, None)

    def found(self) -> dict[str, Any]:
        if self._budget is None:
            return {}
        return {"peaks": {str(self._budget.device): self._budget.peak_bytes}}


class Lines(Instrument):
    """``--lines``: the figures of each line of some functions.

    A function is known by its code, which is found when its module is compiled: so its first call
    is seen, whoever makes it.

    Args:
        asked: as ``"module:qualname"``, or without a module a name in the program itself.
        main_names: what else the program's own module is called.
    """

    option = "--lines"

    def __init__(self, asked: list[str], main_names: tuple[str, ...]) -> None:
        super().__init__()
        self._wanted: dict[str, dict[str, bool]] = {}
        for each in asked:
            module, _, name = each.rpartition(":")
            home = MAIN if not module or module in main_names else module
            self._wanted.setdefault(home, {})[name] = False
        self._main_names = main_names
        self._waiting: list[FunctionType] = []
        self._profiler: LineProfiler | None = None

    @property
    def modules(self) -> list[str]:
        """The modules to look into when they are compiled, ``__main__`` aside."""
        of_main = self._main_names if MAIN in self._wanted else ()
        return [*(name for name in self._wanted if name != MAIN), *of_main]

    def on_code(self, module: str, code: CodeType) -> None:
        """Find the functions in the code of a module that is about to run."""
        home = MAIN if module in self._main_names else module
        for name in self._wanted.get(home, ()):
            for found in _functions_of(code, name):
                self._wanted[home][name] = True
                self._add(_as_function(found, home))

    def on_module(self, module: str) -> None:
        """Find those that a module has from elsewhere, once it was imported."""
        for name, is_found in self._wanted.get(module, {}).items():
            if is_found:
                continue
            value: Any = sys.modules.get(module)
            for part in name.split("."):
                value = getattr(value, part, None)
            if value is not None:
                self._wanted[module][name] = True
                self._add(value)

    def begin(self) -> None:
        from tenure.profiler import LineProfiler

        self._profiler = LineProfiler()
        waiting, self._waiting = self._waiting, []
        for function in waiting:
            self._add(function)
        self._profiler.enable()

    def end(self, error: BaseException | None) -> None:
        if self._profiler is not None:
            self._profiler.disable()

    def found(self) -> dict[str, Any]:
        for module, names in self._wanted.items():
            where = "the program" if module == MAIN else module
            self.notes += [
                f"--lines {name}: {where} has no such function"
                for name, is_found in names.items()
                if not is_found
            ]
        if self._profiler is None:
            return {}
        return {"lines": self._profiler.display() if self._profiler.functions else None}

    def _add(self, function: Any) -> None:
        if self._profiler is None:
            self._waiting.append(function)
            return
        from tenure.profiler import ProfilerUsageError

        try:
            self._profiler.add_function(function)
        except ProfilerUsageError as error:
            self.notes.append(f"--lines: {error}")


def _functions_of(code: CodeType, name: str) -> list[CodeType]:
    """The code of functions of a name, however deep; those that are called so in full, if any."""
    found, to_do = list[CodeType](), [code]
    while to_do:
        inner = [each for each in to_do.pop().co_consts if isinstance(each, CodeType)]
        to_do += inner
        found += (each for each in inner if each.co_flags & 2)  # CO_NEWLOCALS: no class body
    in_full = [each for each in found if each.co_qualname == name]
    return in_full or [each for each in found if each.co_qualname.endswith(f".{name}")]


def _as_function(code: CodeType, module: str) -> FunctionType:
    """A function of this code that is never called: a profiler takes functions."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = FunctionType(code, {"__name__": module}, code.co_name, None, cells)
    function.__qualname__ = code.co_qualname
    return function


class OverTime(Instrument):
    """``--timeline``: live bytes over time."""

    option = "--timeline"
    is_of_one_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._timeline: Any = None
        self._is_open = False
        # the files of what runs the program, down to the command
        self._ours: set[str] = set()

    def begin(self) -> None:
        from tenure.profiler import Timeline

        self._ours = _files_below(sys._getframe())
        self._timeline = Timeline()
        self._timeline.__enter__()
        self._is_open = True

    def end(self, error: BaseException | None) -> None:
        if self._is_open:
            self._is_open = False
            self._timeline.__exit__(None, None, None)

    def found(self) -> dict[str, Any]:
        if self._timeline is None:
            return {}
        report = self._timeline.report
        peaks = {device.device: device.peak_bytes for device in report.devices}
        self.notes += [f"--timeline: {note}" for note in report.notes]
        devices = tuple(
            replace(device, at_peak=tuple(map(self._without_us, device.at_peak)))
            for device in report.devices
        )
        return {"timeline": replace(report, devices=devices), "peaks": peaks}

    def _without_us(self, row: Any) -> Any:
        files = (os.path.abspath(place.rpartition(":")[0]) for place in row.stack)
        stack = zip(row.stack, files, strict=True)
        return replace(row, stack=tuple(place for place, file in stack if file not in self._ours))


class OnOom(Instrument):
    """An out-of-memory error, explained; with ``--on-oom`` also one that the program handles.

    Args:
        sees_handled: whether errors are seen as they are raised, which costs each call of torch.
    """

    option = "--on-oom"
    is_of_one_thread = True

    def __init__(self, *, sees_handled: bool) -> None:
        super().__init__()
        self._recorder: Any = None
        self._sees_handled = sees_handled

    def begin(self) -> None:
        from tenure.profiler import record_oom

        self._recorder = record_oom()
        if not self._sees_handled:
            self._recorder._watch.set_aside()

    def end(self, error: BaseException | None) -> None:
        if self._recorder is not None:
            kind, frames = (type(error), error.__traceback__) if error else (None, None)
            self._recorder.__exit__(kind, error, frames)

    def found(self) -> dict[str, Any]:
        report = None if self._recorder is None else self._recorder.report
        return {} if report is None else {"oom": report}


def _files_below(frame: FrameType | None) -> set[str]:
    """The files of the frames from the one that runs the program outwards."""
    found: set[str] = set()
    is_below = False
    while frame is not None:
        is_below = is_below or frame.f_code.co_name == "run_recorded"
        if is_below:
            found.add(os.path.abspath(frame.f_code.co_filename))
        frame = frame.f_back
    return found


class Memory(Instrument):
    """What was alive at the end, always told.

    Args:
        leaks: is told of the end, where there were too few steps; or None.

    Attributes:
        at_end: what was alive then, once it has ended.
    """

    option = "at the end"

    def __init__(self, leaks: Leaks | None) -> None:
        super().__init__()
        self.at_end: Snapshot | None = None
        self._leaks = leaks
        self._found: dict[str, Any] = {}

    def begin(self) -> None:
        # now, as there may be no memory to import them later
        import tenure.profiler  # noqa: F401

    def end(self, error: BaseException | None) -> None:
        from tenure.profiler import snapshot

        leaks = self._leaks
        try:
            with nullcontext() if leaks is None else leaks.with_variables_of(error):
                found = snapshot()
        except MemoryError:
            self.notes.append(_SHORT_OF_MEMORY)
            return
        self.at_end = found
        self._found["memory"] = self._cut(found.report)
        if leaks is not None:
            self._found.update(leaks.growth(found))

    def found(self) -> dict[str, Any]:
        return {**_accelerator_peaks(), **self._found}

    def abandon(self) -> None:
        pass

    def _cut(self, report: MemReport) -> MemReport:
        """Bounded: a process that is full of small tensors has to write this, too."""
        devices = []
        for device in report.devices:
            rows = sorted(device.rows, key=lambda row: -row.counted_bytes)[:_MOST_ROWS]
            if len(rows) < len(device.rows):
                n = len(device.rows)
                told = f"of {n} tensors on {device.device} at the end, the {_MOST_ROWS} largest"
                self.notes.append(f"{told} are listed")
                device = replace(device, rows=tuple(rows))
            devices.append(device)
        return replace(report, devices=tuple(devices))


def _accelerator_peaks() -> dict[str, Any]:
    """The most that the allocators of accelerators had in use, where the program used one."""
    import torch

    peaks: dict[str, int] = {}
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind)
        # asking would set it up
        if module.is_initialized():
            for i in range(module.device_count()):
                if n_bytes := int(module.max_memory_allocated(i)):
                    peaks[f"{kind}:{i}"] = n_bytes
    return {"peaks": peaks}
