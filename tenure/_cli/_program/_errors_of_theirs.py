"""How a program ended: its exit code, in words, and a traceback without a frame of ours."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

_OURS = __name__.rpartition(".")[0]
# they see each operation, and stand between the program's line and torch
_MEASURING = ("tenure.profiler._", "tenure.adaptive._memory.", "tenure._torch.modules")
# no frame below it is the program's, and only Ctrl-C raises there
_LOOKING = "tenure.profiler._recording._growth_watch"
_BESIDE = frozenset({"torch._ops", "torch._compile", "torch._dynamo.eval_frame"})


class End(NamedTuple):
    """How a program ended.

    Attributes:
        text: in words: ``"exit code 3"``, or the type and the first line of an error.
        exit_code: what the shell is told.
    """

    text: str
    exit_code: int


def end_of(error: BaseException | None) -> End:
    """How a program ended that raised this, or nothing."""
    if error is None:
        return End("exit code 0", 0)
    if isinstance(error, SystemExit):
        return _of_exit(error)
    name = "".join(traceback.format_exception_only(type(error), error)[-1:]).strip()
    first = name.partition("\n")[0]
    interrupted = isinstance(error, KeyboardInterrupt)
    return End(first[:400], 128 + signal.SIGINT if interrupted else 1)


def end_by_signal(number: int) -> End:
    """How a program ended that a signal has killed."""
    return End(signal.Signals(number).name, 128 + number)


def _of_exit(error: SystemExit) -> End:
    # as Python reads it: None is 0, a number is itself, anything else is printed
    if error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 0xFF
        return End(f"exit code {code}", code)
    return End(f"exit code 1 ({str(error.code).partition(chr(10))[0][:200]})", 1)


def tell_without_us(error: BaseException, after: Callable[[], None]) -> None:
    """Let the traceback of an error that goes on begin with the program's first frame.

    The interpreter tells it by ``sys.excepthook``, which is the program's: it stands aside until
    then, and is back before it is called.
    """
    theirs = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        sys.excepthook = theirs
        if value is error:
            frames = value.__traceback__ = sys.last_traceback = _theirs(_below(frames))
            _clean_chain(value)
        try:
            theirs(kind, value, frames)
        finally:
            after()

    if not isinstance(error, SystemExit):
        sys.excepthook = hook


def _below(frames: TracebackType | None) -> TracebackType | None:
    """The frames that come after ours; all, where there are none of ours."""
    found, is_inside = frames, False
    while found is not None:
        is_ours = found.tb_frame.f_globals.get("__name__", "").startswith(_OURS)
        if is_inside and not is_ours:
            return found
        is_inside, found = is_inside or is_ours, found.tb_next
    # nothing of the program ran: it did not even compile
    return None if is_inside else frames


def _clean_chain(error: BaseException) -> None:
    """The same for the errors that led to this one."""
    seen, to_do = {id(error)}, [error.__cause__, error.__context__]
    while to_do:
        each = to_do.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _theirs(each.__traceback__)
        to_do += [each.__cause__, each.__context__]


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames of what measures each operation, and of torch where that calls it.

    What the program itself has opened of tenure stands elsewhere, and stays.
    """
    kept: list[TracebackType] = []
    # frames of torch around a measuring one belong to it, and to an error of torch's else
    run: list[TracebackType] = []
    is_measured, found = False, frames
    while found is not None:
        module = found.tb_frame.f_globals.get("__name__", "")
        if module == _LOOKING:
            break
        is_ours = module.startswith(_MEASURING)
        if is_ours or module in _BESIDE:
            run.append(found)
            is_measured = is_measured or is_ours
        else:
            kept += [] if is_measured else run
            kept.append(found)
            run, is_measured = [], False
        found = found.tb_next
    kept += [] if is_measured else run
    # what has nothing else is an error of ours, and is shown as it is
    if not kept:
        return frames
    chain: TracebackType | None = None
    for each in reversed(_called_once(kept)):
        chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain


def _called_once(frames: list[TracebackType]) -> list[TracebackType]:
    """Without what torch does to ask a mode of ours before it runs a function of its own again."""
    found = list[TracebackType]()
    for each in frames:
        asks = found[-1:] and found[-1].tb_frame.f_code.co_name == "handle_torch_function"
        if asks and found[-2:-1] and found[-2].tb_frame.f_code is each.tb_frame.f_code:
            del found[-2:]
        found.append(each)
    return found
