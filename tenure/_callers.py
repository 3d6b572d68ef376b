"""Whose code a frame runs, and where in the user's program something happened.

A site is a code object and an instruction, spelled out only when it is read; it holds no frame, so
it keeps no local variable alive. A note of where a tensor was made is a weak reference to the
tensor: it goes with the tensor and keeps nothing alive either.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, Self

from torch import Tensor

from tenure._cells import cell_of, is_cell
from tenure._errors import TenureWarning

Capture = Literal["site", "stack"]

CONTEXTLIB = vars(contextlib)
"""The globals of the frames that run an ExitStack or a decorated context manager."""
_OWN_PACKAGE = __name__.partition(".")[0]
_PROGRAMS = (f"{_OWN_PACKAGE}._cli", f"{_OWN_PACKAGE}._demo")
"""What stands in the package and uses it like any program."""
RUNNER = f"{_OWN_PACKAGE}._cli._program"
"""What stands below a program that the command line runs, and is no part of it."""
_INTERNAL = frozenset({_OWN_PACKAGE, "torch", "contextlib"})
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_STANDARD = os.path.dirname(os.__file__)
_INSTALLED = ("site-packages", "dist-packages")
_STACK_DEPTH = 16
_HANDLER = "__torch_function__"
# a mode calls torch in its handler, or in a function or two that the handler calls
_REACH = 6
# no function of a program has a dot in its name
_STAND_IN = f"{_OWN_PACKAGE}.profiler._stand_in"
# what ``torch.compiler.disable`` puts around a handler
_WRAPPER = "torch._dynamo."


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code ``frame`` runs; "" if ``exec`` hides it."""
    if frame.f_code.co_name == _STAND_IN:
        return _STAND_IN
    name = frame.f_globals.get("__name__")
    # a subclass of str would have us run its code, in the midst of somebody else's operation
    return name if type(name) is str else ""


def package_of(frame: FrameType) -> str:
    """Return the name of the outermost package whose code ``frame`` runs."""
    return module_of(frame).partition(".")[0]


def is_tenure(frame: FrameType) -> bool:
    """Return whether ``frame`` is tenure's; its command line and demo count as programs."""
    name = module_of(frame)
    return name.partition(".")[0] == _OWN_PACKAGE and not _is_program(name)


def is_internal(frame: FrameType) -> bool:
    """Return whether ``frame`` is of tenure, or of torch or contextlib calling tenure."""
    # the module is asked for once: this runs for each frame between an operation and its user
    name = module_of(frame)
    return name.partition(".")[0] in _INTERNAL and not _is_program(name)


def _is_program(name: str) -> bool:
    return name.startswith(_PROGRAMS) and not name.startswith(RUNNER)


def is_installed(path: str) -> bool:
    """Return whether a file is of an installed package."""
    return any(part in path for part in _INSTALLED)


def is_standard(path: str) -> bool:
    """Return whether a file is of Python's own library."""
    # without a virtual environment, packages are installed below it
    return path.startswith(_STANDARD) and not is_installed(path)


def user_frame(frame: FrameType) -> FrameType:
    """Return the nearest frame, from ``frame`` outwards, that is not internal.

    Where there is none (torch calls back on a thread of its own), ``frame`` itself.
    """
    outer: FrameType | None = frame
    while outer is not None and is_internal(outer):
        outer = outer.f_back
    return outer or frame


def warn_user(message: str, category: type[TenureWarning]) -> None:
    """Warn, with the place of the innermost frame that is the user's."""
    # a fixed stacklevel would be right for one way in, and a frame of torch or ours for the next
    level, frame = 1, sys._getframe()
    while frame.f_back and is_internal(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Show no warnings of work that is tried and not run, such as of two samples.

    After `warnings.catch_warnings`, Python shows again what it has shown once.
    """
    ignored: Any = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, ignored)
    try:
        yield
    finally:
        # by identity: the work may have added an equal one
        filters[:] = [each for each in filters if each is not ignored]


def maker_of(frame: FrameType) -> FrameType:
    """Return the frame that called torch, where ``frame`` is the one that called tenure's handler.

    A torch-function mode above tenure's, such as ``with torch.device("cuda"):``, is called first,
    and calls on. Its frames then stand between the handler and the code that wanted a tensor.
    """
    found = frame
    while (outer := outside_of_mode(found)) is not None:
        found = outer
    return found


def outside_of_mode(frame: FrameType) -> FrameType | None:
    """Return the frame that called the mode whose handler ``frame`` runs in, if any."""
    inner: FrameType | None = frame
    for _ in range(_REACH):
        if inner is None:
            return None
        if inner.f_code.co_name == _HANDLER:
            return _unwrapped(inner.f_back)
        inner = inner.f_back
    return None


def _unwrapped(frame: FrameType | None) -> FrameType | None:
    while frame is not None and module_of(frame).startswith(_WRAPPER):
        frame = frame.f_back
    return frame


def stand_in(frame: FrameType) -> Callable[..., Any]:
    """Return a caller whose warnings are reported at the line of ``frame``.

    C code warns of the innermost frame of Python: its file, its line, and the module by which
    filters choose. In a handler of torch that frame would be tenure's, and a filter of the program
    would not meet it. The stand-in's file, line and names are those of ``frame``.

    Returns:
        A function of the function, its arguments, and its keyword arguments or None.
    """
    return FunctionType(_stand_in(frame.f_code.co_filename, frame.f_lineno), frame.f_globals)


# Code alone is kept: the names of a module, and what they hold, go when it goes.
@functools.lru_cache(maxsize=4096)
def _stand_in(path: str, line: int | None) -> CodeType:
    return _CALL.replace(co_filename=path, co_firstlineno=line or 1, co_name=_STAND_IN)


# in one line, which is then that of the caller
_CALL = (lambda func, args, kwargs: func(*args, **(kwargs or {}))).__code__


class Site:
    """One place in a program; ``str(site)`` reads as `line_in` spells it.

    Args:
        code: the code that runs there.
        instruction: how far it is.
        around: the places of the calls that led to it, innermost first, if they are captured.
    """

    __slots__ = ("_around", "_code", "_instruction")

    def __init__(
        self, code: CodeType, instruction: int = -1, around: tuple[Site, ...] = ()
    ) -> None:
        self._code = code
        self._instruction = instruction
        self._around = around

    @property
    def line(self) -> int:
        """The line number; that of the ``def`` when no instruction is known."""
        line = None if self._instruction < 0 else position_of(self._code, self._instruction)[0]
        return line or self._code.co_firstlineno

    @property
    def is_own(self) -> bool:
        """Whether the line is in a file of tenure."""
        return self._code.co_filename.startswith(_OWN_FOLDER)

    def __str__(self) -> str:
        return " < ".join((line_in(self._code.co_filename, self.line), *map(str, self._around)))

    def __repr__(self) -> str:
        return f"<Site {self}>"


def position_of(code: CodeType, instruction: int) -> tuple[int | None, int | None]:
    """Return the line and the column of an instruction; None for what the compiler left out."""
    # there is one entry for each code unit of two bytes
    positions = itertools.islice(code.co_positions(), instruction // 2, None)
    line, _, column, _ = next(positions, (None, None, None, None))
    return line, column


def opening_site(code: CodeType, instruction: int, frame_id: int) -> Site:
    """Return the call site that opened a block; for tenure's own blocks, the user's call site.

    Args:
        code: what the frame that opened it runs.
        instruction: how far that frame was.
        frame_id: the identity of that frame, which is looked for on this thread.
    """
    # a block that opens keeps no frame, and looks at none: only tenure's own pay for a search
    if code.co_filename.startswith(_OWN_FOLDER):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_code is not code or id(frame) != frame_id):
            frame = frame.f_back
        if frame is not None:
            return _place(user_frame(frame))
    return Site(code, instruction)


def user_site() -> Site:
    """Return the place in the user's program that called into tenure."""
    return _place(user_frame(sys._getframe(1)))


def capture_site(frame: FrameType, capture: Capture) -> Site:
    """Return the user's place at or around ``frame``, alone or with the calls that led to it."""
    user = user_frame(frame)
    around: list[Site] = []
    # what stands below a cell is the notebook's, and no part of the program
    outer = user if capture == "stack" else None
    while outer is not None and len(around) < _STACK_DEPTH - 1:
        outer = None if is_cell(outer.f_code) else outer.f_back
        around += [] if outer is None else [_place(outer)]
    return Site(user.f_code, user.f_lasti, tuple(around))


def _place(frame: FrameType) -> Site:
    return Site(frame.f_code, frame.f_lasti)


def line_in(path: str, line: int) -> str:
    """Return a line as messages and tables spell it: ``train.py:41``, ``Cell In[2], line 3``.

    Args:
        path: that code was compiled under; one below the working directory is told from there.
        line: its number.
    """
    if (cell := cell_of(path)) is not None:
        return f"{cell}, line {line}"
    try:
        inside = os.path.relpath(path)
    # another drive, or a working directory that is gone
    except (ValueError, OSError):
        inside = path
    return f"{path if inside.startswith(os.pardir) else inside}:{line}"


def line_and_function(code: CodeType, line: int) -> str:
    """Return the line with its function, as ``train.py:41 in step``; a cell has none."""
    place = line_in(code.co_filename, line)
    return place if is_cell(code) else f"{place} in {code.co_name}"


class SitedRef(weakref.ref[Tensor]):
    """A weak reference that also knows where its tensor was made."""

    __slots__ = ("site",)
    site: Any

    def __new__(cls, tensor: Tensor, site: object) -> Self:
        reference = super().__new__(cls, tensor)
        reference.site = site
        return reference


def created_at(tensor: Tensor) -> str | None:
    """Return the line where a scope with ``capture=`` saw the tensor made; else None."""
    # Python lists the weak references to an object: the tensor needs no attribute, which a
    # subclass may refuse, and no table of ours has to follow its life
    for reference in weakref.getweakrefs(tensor):
        if type(reference) is SitedRef:
            return str(reference.site)
    return None
