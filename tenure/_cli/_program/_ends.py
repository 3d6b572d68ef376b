"""The end of a program: in words, by a signal, and with a traceback without frames of tenure."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_OURS = __name__.rpartition(".")[0]
# they see each operation, or each call of a module
_MEASURING = (
    "tenure.profiler._", "tenure.adaptive._memory.", "tenure._stream.", "tenure._torch.modules",
)  # fmt: skip
# torch calls what measures through these
_BESIDE = frozenset({"torch._ops", "torch._compile", "torch._dynamo.eval_frame"})
_IMPORTS = "_Imports."
# no frame below it is the program's, and only Ctrl-C raises there
_LOOKING = "tenure.profiler._recording._growth"
_DEADLY = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


End = tuple[str, int]
"""The end of a program, such as ``"exit code 3"``, an error or a signal; and its exit code."""


def end_of(error: BaseException | None) -> End:
    """Return how a program ended that raised this error, or none."""
    if error is None or isinstance(error, SystemExit):
        # as Python reads it: None is 0, a number is itself, anything else is printed
        code = None if error is None else error.code
        if code is None or isinstance(code, int):
            return f"exit code {(code or 0) & 0xFF}", (code or 0) & 0xFF
        return f"exit code 1 ({str(code).partition(chr(10))[0][:200]})", 1
    name = "".join(traceback.format_exception_only(type(error), error)[-1:]).strip()
    interrupted = isinstance(error, KeyboardInterrupt)
    return name.partition("\n")[0][:400], 128 + signal.SIGINT if interrupted else 1


class Deaths:
    """Handles the signals that end a process without its exit handlers.

    A program that handles such a signal itself does so; then this is not called. In a long call of
    C it comes later, as Ctrl-C does.

    Args:
        before: is called with the number of the signal, before it ends the process.
    """

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before = before

    def begin(self) -> None:
        """Handle those that would end the process now; one that is ignored stays so."""
        self._exchange(signal.SIG_DFL, self._handle)

    def end(self) -> None:
        """Let them do what they did, unless the program has said otherwise.

        Called before a fork as well: a handler that is still there when a signal comes to the new
        child would lose it.
        """
        self._exchange(self._handle, signal.SIG_DFL)

    def _exchange(self, old: object, new: Any) -> None:
        for number in _DEADLY:
            # a thread that forks can't, and its child does when it ends what it has of this
            with suppress(ValueError):
                if signal.getsignal(number) == old:
                    signal.signal(number, new)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let none come in a block on the main thread; those that end the process come after it.

        Ctrl-C is dropped: the program has ended. A mask would not do, for a signal is handled here
        also if it was delivered to another thread.
        """
        came = list[int]()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_DEADLY)}
        held = {n: each for n, each in handlers.items() if each not in (None, signal.SIG_IGN)}
        for number in held:
            signal.signal(number, lambda number, _: came.append(number))
        try:
            yield
        finally:
            for number, handler in held.items():
                signal.signal(number, handler)
            for number in {*came} - {signal.SIGINT}:
                os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number)
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def tell_without_us(error: BaseException) -> None:
    """Let the traceback of an error that goes on begin with the program's first frame.

    The interpreter prints it by ``sys.excepthook``, which is the program's: it stands aside until
    then, and is back before it is called.
    """
    theirs, cleaned = sys.excepthook, _cleaned(error.__traceback__)

    def hook(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        sys.excepthook = theirs
        if value is error:
            _clean_chain(value)
            value.__traceback__ = frames = sys.last_traceback = cleaned
        theirs(kind, value, frames)

    if not isinstance(error, SystemExit):
        sys.excepthook = hook


def _clean_chain(error: BaseException) -> None:
    """Clean the tracebacks of the errors that led to this one."""
    seen, to_do = {id(error)}, [error.__cause__, error.__context__]
    while to_do:
        each = to_do.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _cleaned(each.__traceback__)
            to_do += each.__cause__, each.__context__


def _cleaned(entry: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of what runs and measures the program.

    The frames of what the program itself uses of tenure stay.
    """
    entries = list[TracebackType]()
    while entry is not None and not _module(entry).startswith(_LOOKING):
        entries.append(entry)
        entry = entry.tb_next
    modules = {_module(each) for each in entries}
    hidden = {name for name in modules if name.startswith((_OURS, *_MEASURING))}
    if any(name.startswith(_MEASURING) for name in hidden):
        hidden |= _BESIDE
    # Python takes the frames of imports away itself, if nobody stands between them
    is_watched = any(each.tb_frame.f_code.co_qualname.startswith(_IMPORTS) for each in entries)
    loader = "<frozen importlib" if is_watched else "\0"
    chain: TracebackType | None = None
    for each in reversed(entries):
        is_loader = each.tb_frame.f_code.co_filename.startswith(loader)
        if _module(each) not in hidden and not is_loader:
            chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))
