"""What a function does with its variables, read from its bytecode; nothing runs.

A name says which variable or attribute is meant, without what it is an attribute of.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType

_GROWS = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put"}
)
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")
_FREES = ("DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF")
_ENDS = ("POP_TOP", "FOR_ITER", "RESUME", "JUMP", "POP_JUMP", "RETURN", "STORE_SUBSCR")
_NO_NEXT = ("RETURN_", "RAISE_", "RERAISE", "JUMP_")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@lru_cache(maxsize=2048)
def carried_names(code: CodeType) -> frozenset[str]:
    """Names that a statement reads and binds anew, as ``h`` in ``h = cell(x, h)``."""
    found: set[str] = set()
    # read by the statement; and since its first target, for a further target or the next statement
    loaded: set[str] = set()
    since: set[str] | None = None
    for instruction in dis.get_instructions(code):
        stored = _names(instruction, _STORES)
        if stored:
            found.update(loaded.intersection(stored))
            since = set()
        elif not instruction.opname.startswith("LOAD_") and since is not None:
            loaded, since = since, None
        if instruction.opname.startswith(_ENDS):
            loaded = set()
        (loaded if since is None else since).update(_names(instruction, _LOADS))
    return frozenset(found)


@lru_cache(maxsize=2048)
def grown_names(code: CodeType) -> frozenset[str]:
    """Names of what the function, or one inside it, appends to, assigns items of, or adds to."""
    found: set[str] = set()
    # all names of a statement that adds to one of them, because none that is left may be added to
    loaded: set[str] = set()
    for instruction in dis.get_instructions(code):
        names = _names(instruction, _LOADS)
        if instruction.opname == "STORE_SUBSCR" or _GROWS.intersection(names):
            found |= loaded
            # the attribute in which a Queue keeps its items
            found |= {"queue"} if "put" in names else set()
        if instruction.opname.startswith((*_ENDS, *_STORES)):
            loaded = set()
        loaded.update(names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= grown_names(inner)
    return frozenset(found) | carried_names(code)


def dead_names(frame: FrameType) -> frozenset[str]:
    """Variables that are not read again before they are bound anew, nor by what runs now."""
    code = frame.f_code
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: i for i, instruction in enumerate(instructions)}
    # the caches of an instruction follow it, and the last offset may be in them
    start = bisect_right(list(at), frame.f_lasti) - 1
    if start < 0:
        return frozenset()
    is_module = frame.f_locals is frame.f_globals
    names = set(code.co_varnames) if not is_module else set(code.co_names)
    # what an inner function shares, or may read of the module, is read whenever that runs
    names -= {*code.co_cellvars, *code.co_freevars}
    names.difference_update(*map(_all_names, inner_codes(code)))
    names.difference_update(_being_used(instructions, start))
    following = _following(code, instructions, at)
    return frozenset(name for name in names if not _is_read(name, start, instructions, following))


def _is_read(
    name: str, start: int, instructions: list[dis.Instruction], following: list[list[int]]
) -> bool:
    seen: set[int] = set()
    waiting = list(following[start])
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        # one instruction can store a variable and load another
        if name in _names(instructions[i], _LOADS):
            return True
        if name not in _names(instructions[i], (*_STORES, *_FREES)):
            waiting += following[i]
    return False


def _following(
    code: CodeType, instructions: list[dis.Instruction], at: dict[int, int]
) -> list[list[int]]:
    found: list[list[int]] = []
    for i, instruction in enumerate(instructions):
        goes_on = not instruction.opname.startswith(_NO_NEXT) and i + 1 < len(instructions)
        found.append([i + 1] if goes_on else [])
        if instruction.opcode in _JUMPS and instruction.argval in at:
            found[i].append(at[instruction.argval])
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        for offset, i in at.items():
            if entry.start <= offset < entry.end and entry.target in at:
                found[i].append(at[entry.target])
    return found


def _being_used(instructions: list[dis.Instruction], start: int) -> Iterator[str]:
    """What the statement that runs has read."""
    for instruction in reversed(instructions[: start + 1]):
        if instruction.opname.startswith((*_ENDS, "STORE_")):
            return
        yield from _names(instruction, _LOADS)


def _names(instruction: dis.Instruction, kinds: tuple[str, ...]) -> Iterable[str]:
    """The names that an instruction loads, or those that it stores.

    From Python 3.12 on one instruction can do both: ``STORE_FAST_LOAD_FAST``. From 3.14 on a load
    can be without a reference: ``LOAD_FAST_BORROW_LOAD_FAST_BORROW``.
    """
    name, value = instruction.opname.replace("_BORROW", ""), instruction.argval
    if type(value) is tuple:
        parts = [f"{part}_FAST" for part in name.split("_FAST_")]
        return [each for part, each in zip(parts, value, strict=False) if part in kinds]
    return (value,) if type(value) is str and name.startswith(kinds) else ()


def inner_codes(code: CodeType) -> Iterator[CodeType]:
    """The functions and classes that are defined inside, at any depth."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from inner_codes(inner)


def _all_names(code: CodeType) -> tuple[str, ...]:
    return (*code.co_names, *code.co_freevars)
