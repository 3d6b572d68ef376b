"""Where storages were made: the user's line and the calls that led to it, each stack once.

A place holds code objects and instructions, and no frame; it is spelled when the recording ends.
Invariant: however much code a program makes as it runs, a bounded number of it is held.
"""

from __future__ import annotations

from types import CodeType, FrameType

from tenure._callers import RUNNER, Site, is_internal, line_and_function, module_of
from tenure._cells import is_cell

from ._timeline_report import BEFORE_STACK

BEFORE, NOWHERE, ELSEWHERE = range(3)
"""The places of what was there before the recording began, of what was made where no line of Python
runs, and of what was made on lines beyond the most that are told apart."""
_WORDS = (BEFORE_STACK, ("a thread of torch",), ("more lines than are told apart",))
# A few calls tell a helper's callers apart; each frame takes a tenth of a microsecond.
_DEPTH = 4
# a large program has some thousand; a program that runs generated code has no end of them
_MOST_PLACES = _MOST_CODES = 20_000
_LOADER = "torch.utils.data"
_INTERNAL, _USER, _OF_LOADER, _CELL, _OUTSIDE = range(5)


class Places:
    """Stacks by number.

    Attributes:
        are_inputs: of each number, whether a data loader made what was made there.
    """

    def __init__(self) -> None:
        self.are_inputs = [False] * len(_WORDS)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stacks: list[list[tuple[CodeType, int]]] = [[] for _ in _WORDS]
        # By identity, because the hash of a code object is that of all its constants. Each is held,
        # so that no other object gets its identity.
        self._kinds: dict[int, tuple[CodeType, int]] = {}

    def of(self, frame: FrameType | None) -> int:
        """Return the place of what is being made in ``frame``, or in what called it."""
        steps: list[tuple[CodeType, int]] = []
        kinds, is_of_loader = self._kinds, False
        while frame is not None and len(steps) < _DEPTH:
            code = frame.f_code
            known = kinds.get(id(code))
            kind = self._judge(frame) if known is None else known[1]
            if kind == _OF_LOADER:
                is_of_loader = True
            # below it is only the command that runs the program
            elif kind == _OUTSIDE:
                break
            elif kind != _INTERNAL:
                steps.append((code, frame.f_lasti))
                # what stands below a cell is the notebook's, and no part of the program
                if kind == _CELL:
                    break
            frame = frame.f_back
        if not steps:
            return NOWHERE
        key = (is_of_loader, *[part for code, at in steps for part in (id(code), at)])
        number = self._numbers.get(key)
        if number is None:
            number = len(self._stacks)
            if number >= _MOST_PLACES:
                return ELSEWHERE
            self._numbers[key] = number
            self._stacks.append(steps)
            self.are_inputs.append(is_of_loader)
        return number

    def stack(self, number: int) -> tuple[str, ...]:
        """Return the calls that led to a place, as ``train.py:17 in step``, outermost first."""
        if number < len(_WORDS):
            return _WORDS[number]
        steps = reversed(self._stacks[number])
        return tuple(line_and_function(code, Site(code, at).line) for code, at in steps)

    def _judge(self, frame: FrameType) -> int:
        if len(self._kinds) >= _MOST_CODES:
            self._kinds.clear()
        if not is_internal(frame):
            kind = _CELL if is_cell(frame.f_code) else _USER
        else:
            module = module_of(frame)
            kind = _OF_LOADER if module.startswith(_LOADER) else _INTERNAL
            if module.startswith(RUNNER):
                kind = _OUTSIDE
        self._kinds[id(frame.f_code)] = frame.f_code, kind
        return kind
