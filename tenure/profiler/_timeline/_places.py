"""Where storages were made: the user's line and the calls that led to it, each stack once.

A place holds code objects and instructions, and no frame; it is spelled when the recording ends.
Invariant: however much code a program makes as it runs, a bounded number of it is held.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import NamedTuple

from tenure._callers import RUNNER, Site, is_internal, line_and_function, module_of
from tenure._cells import is_cell

BEFORE = 0
"""The place of what was there before the recording began."""
NOWHERE = 1
"""The place of what was made where no line of Python runs, as on a thread of autograd's engine."""
ELSEWHERE = 2
"""The place of what was made on lines beyond the most that are told apart."""
BEFORE_STACK = ("before the recording",)
_WORDS = {
    BEFORE: BEFORE_STACK,
    NOWHERE: ("a thread of torch",),
    ELSEWHERE: ("more lines than are told apart",),
}
# A few calls tell a helper's callers apart; each frame takes a tenth of a microsecond.
_DEPTH = 4
# a large program has some thousand; a program that runs generated code has no end of them
_MOST_PLACES = _MOST_CODES = 20_000
_LOADER = "torch.utils.data"
_INTERNAL, _USER, _OF_LOADER, _CELL, _OUTSIDE = range(5)


class _Step(NamedTuple):
    code: CodeType
    instruction: int


class Places:
    """Stacks by number.

    Attributes:
        are_inputs: of each number, whether a data loader made what was made there.
    """

    def __init__(self) -> None:
        self.are_inputs = [False] * len(_WORDS)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[_Step, ...]] = [()] * len(_WORDS)
        # By identity, because the hash of a code object is that of all its constants. The second
        # holds each, so that no other object gets its identity.
        self._kinds: dict[int, int] = {}
        self._codes: list[CodeType] = []

    def of(self, frame: FrameType | None) -> int:
        """The place of what is being made in ``frame``, or in what called it."""
        kinds, key, innermost = self._kinds, [0], frame
        n_user = 0
        while frame is not None:
            code = frame.f_code
            try:
                kind = kinds[id(code)]
            except KeyError:
                kind = self._judge(frame)
            if kind == _USER:
                key.append(id(code))
                key.append(frame.f_lasti)
                n_user += 1
                if n_user == _DEPTH:
                    break
            elif kind == _OF_LOADER:
                key[0] = 1
            elif kind == _CELL:
                # what stands below a cell is the notebook's, and no part of the program
                key.append(id(code))
                key.append(frame.f_lasti)
                n_user += 1
                break
            elif kind == _OUTSIDE:
                # below it is only the command that runs the program
                break
            frame = frame.f_back
        if not n_user:
            return NOWHERE
        found = self._numbers.get(tuple(key))
        return self._enter(tuple(key), innermost) if found is None else found

    def stack(self, number: int) -> tuple[str, ...]:
        """The calls that led to a place, as ``train.py:17 in step``, outermost first."""
        if number in _WORDS:
            return _WORDS[number]
        return tuple(_spelled(step) for step in reversed(self._stacks[number]))

    def line(self, number: int) -> str:
        """The line of a place itself."""
        return self.stack(number)[-1]

    def _judge(self, frame: FrameType) -> int:
        if len(self._codes) >= _MOST_CODES:
            self._kinds.clear()
            self._codes.clear()
        if not is_internal(frame):
            kind = _CELL if is_cell(frame.f_code) else _USER
        else:
            module = module_of(frame)
            kind = _OF_LOADER if module.startswith(_LOADER) else _INTERNAL
            if module.startswith(RUNNER):
                kind = _OUTSIDE
        self._codes.append(frame.f_code)
        self._kinds[id(frame.f_code)] = kind
        return kind

    def _enter(self, key: tuple[int, ...], frame: FrameType | None) -> int:
        if len(self._stacks) >= _MOST_PLACES:
            return ELSEWHERE
        steps: list[_Step] = []
        wanted = set(key[1::2])
        while frame is not None and len(steps) < len(key) // 2:
            if id(frame.f_code) in wanted:
                steps.append(_Step(frame.f_code, frame.f_lasti))
            frame = frame.f_back
        number = self._numbers[key] = len(self._stacks)
        self._stacks.append(tuple(steps))
        self.are_inputs.append(bool(key[0]))
        return number


def _spelled(step: _Step) -> str:
    return line_and_function(step.code, Site(*step).line)
