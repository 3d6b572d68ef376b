"""How a program ended: its exit code, in words, and a traceback without a frame of ours."""

from __future__ import annotations

import signal
import sys
import traceback
from types import TracebackType
from typing import NamedTuple

_OURS = __name__.rpartition(".")[0]
# they see each operation, or each call of a module
_MEASURING = ("tenure.profiler._", "tenure.adaptive._memory.", "tenure._torch.modules")
# torch calls what measures through these
_BESIDE = frozenset({"torch._ops", "torch._compile", "torch._dynamo.eval_frame"})
# no frame below it is the program's, and only Ctrl-C raises there
_LOOKING = "tenure.profiler._recording._growth"


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
        # as Python reads it: None is 0, a number is itself, anything else is printed
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
            return End(f"exit code {code}", code)
        return End(f"exit code 1 ({str(error.code).partition(chr(10))[0][:200]})", 1)
    name = "".join(traceback.format_exception_only(type(error), error)[-1:]).strip()
    interrupted = isinstance(error, KeyboardInterrupt)
    return End(name.partition("\n")[0][:400], 128 + signal.SIGINT if interrupted else 1)


def end_by_signal(number: int) -> End:
    """How a program ended that a signal has killed."""
    return End(signal.Signals(number).name, 128 + number)


def tell_without_us(error: BaseException) -> None:
    """Let the traceback of an error that goes on begin with the program's first frame.

    The interpreter tells it by ``sys.excepthook``, which is the program's: it stands aside until
    then, and is back before it is called.
    """
    theirs = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        sys.excepthook = theirs
        if value is error:
            _clean_chain(value)
            frames = sys.last_traceback = value.__traceback__
        theirs(kind, value, frames)

    if not isinstance(error, SystemExit):
        sys.excepthook = hook


def _clean_chain(error: BaseException) -> None:
    """Clean the tracebacks of an error, and of those that led to it."""
    seen, to_do = set[int](), [error]
    while to_do:
        each = to_do.pop()
        if id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _theirs(each.__traceback__)
            to_do += [led for led in (each.__cause__, each.__context__) if led is not None]


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """The frames below the last of what runs the program, without those of what measures it.

    What the program itself has opened of tenure stands elsewhere, and stays.
    """
    kept = list[TracebackType]()
    is_told = is_measured = False
    while frames is not None:
        module = frames.tb_frame.f_globals.get("__name__", "")
        if module.startswith(_LOOKING):
            break
        if module == f"{_OURS}._imports":
            is_told = True
        elif module.startswith(_OURS):
            kept.clear()
        elif module.startswith(_MEASURING):
            is_measured = True
        else:
            kept.append(frames)
        frames = frames.tb_next
    # Python takes the frames of imports away itself where nobody stands between them
    beside = _BESIDE if is_measured else frozenset[str]()
    imports = ("<frozen importlib",) if is_told else ()
    kept = [
        each
        for each in kept
        if each.tb_frame.f_globals.get("__name__", "") not in beside
        and not each.tb_frame.f_code.co_filename.startswith(imports)
    ]
    chain: TracebackType | None = None
    for each in reversed(kept):
        chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain
