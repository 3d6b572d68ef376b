"""Where in the user's program something happened, kept cheaply and spelled out only when read.

A site is a code object and an instruction; it holds no frame, so it keeps no local variable alive.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from types import CodeType, FrameType
from typing import Literal

from tenure._frames import is_internal
from tenure._frames import module_of as module_of

Capture = Literal["site", "stack"]

CONTEXTLIB = vars(contextlib)
"""The globals of the frames that run an ExitStack or a decorated context manager."""
_STACK_DEPTH = 16
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class Site:
    """One place in a source file; ``str(site)`` reads ``train.py:41``."""

    __slots__ = ("_code", "_instruction")

    def __init__(self, code: CodeType, instruction: int = -1) -> None:
        self._code = code
        self._instruction = instruction

    @property
    def line(self) -> int:
        """The line number; that of the ``def`` when no instruction is known."""
        if self._instruction < 0:
            return self._code.co_firstlineno
        positions = itertools.islice(self._code.co_positions(), self._instruction // 2, None)
        return next(positions, (None,))[0] or self._code.co_firstlineno

    def __str__(self) -> str:
        return f"{_shorten(self._code.co_filename)}:{self.line}"

    def __repr__(self) -> str:
        return f"<Site {self}>"


class SiteStack:
    """The places of a call stack, innermost first."""

    __slots__ = ("_sites",)

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self._sites = sites

    def __str__(self) -> str:
        return " < ".join(map(str, self._sites))


def site_of(frame: FrameType) -> Site:
    """The place that ``frame`` has reached."""
    return Site(frame.f_code, frame.f_lasti)


def user_frame(frame: FrameType) -> FrameType:
    """The nearest frame, from ``frame`` outwards, that is not tenure's, torch's or contextlib's.

    Where there is none (torch calls back on a thread of its own), ``frame`` itself.
    """
    outer: FrameType | None = frame
    while outer is not None and is_internal(outer):
        outer = outer.f_back
    return outer or frame


def opening_site(code: CodeType, instruction: int, frame_id: int) -> Site:
    """The place that opened a block; of a block of tenure's own, the user's place that led to it.

    Args:
        code: what the frame that opened it runs.
        instruction: how far that frame was.
        frame_id: the identity of that frame, which is looked for on this thread.
    """
    if code.co_filename.startswith(_OWN_FOLDER):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_code is not code or id(frame) != frame_id):
            frame = frame.f_back
        if frame is not None:
            return site_of(user_frame(frame))
    return Site(code, instruction)


def user_site() -> Site:
    """The place in the user's program that called into tenure."""
    return site_of(user_frame(sys._getframe(1)))


def capture_site(frame: FrameType, capture: Capture) -> Site | SiteStack:
    """The user's place at or around ``frame``, alone or with the calls that led to it."""
    user = user_frame(frame)
    if capture == "site":
        return site_of(user)
    sites: list[Site] = []
    outer: FrameType | None = user
    while outer is not None and len(sites) < _STACK_DEPTH:
        sites.append(site_of(outer))
        outer = outer.f_back
    return SiteStack(tuple(sites))


def _shorten(path: str) -> str:
    try:
        inside = os.path.relpath(path)
    except (ValueError, OSError):  # another drive, or a working directory that is gone
        return path
    return path if inside.startswith(os.pardir) else inside
