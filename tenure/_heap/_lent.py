"""Which variables and arguments of a running function add a reference to their object.

Up to Python 3.13 all do. From 3.14 on, a function that passes a variable on lends its reference to
the parameter. If that parameter were counted as a holder, the count would leave no reference for
some real holder, and the search would not look for it. Only a bit in the interpreter's frame tells.
"""

import ctypes
import functools
import inspect
import sys
from types import CodeType, FrameType

from tenure._errors import TenureError
from tenure._torch.counting import SOLE

LENDS = sys.version_info >= (3, 14)
"""Whether this Python has references that are lent."""
_WORD = ctypes.sizeof(ctypes.c_void_p)
# in a frame object, behind its reference count, its class and `f_back`
_INTERPRETER_FRAME = object.__basicsize__ + _WORD
# In the frame of the interpreter, in words. Variables, and behind them the values in flight, are
# addresses of objects; the lowest bit is set if one adds no reference. Source:
# https://github.com/python/cpython/blob/3.14/Include/internal/pycore_interpframe_structs.h
_FRAME_OBJECT, _STACK_POINTER, _VARIABLES = 6, 8, 10
_ADDS_NONE = 1


def lent_parameters(frame: FrameType) -> frozenset[str]:
    """Return the parameters of a function that add no reference to their object.

    Raises:
        TenureError: this Python has frames of another layout.
    """
    if not LENDS:
        return frozenset()
    _check_layout()
    code = frame.f_code
    rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + rest]
    words = _words(frame, _VARIABLES + len(names))[_VARIABLES:]
    return frozenset(name for name, word in zip(names, words, strict=True) if word & _ADDS_NONE)


def values_in_flight(frame: FrameType) -> list[int]:
    """Return the ids of objects that a function holds beside its variables, as arguments of a call.

    Only for a Python with `LENDS`.

    Raises:
        TenureError: this Python has frames of another layout.
    """
    _check_layout()
    begin = _VARIABLES + _n_variables(frame.f_code)
    return [
        word for word in _words(frame, begin + _n_in_flight(frame))[begin:] if not word & _ADDS_NONE
    ]


def _n_variables(code: CodeType) -> int:
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def _n_in_flight(frame: FrameType) -> int:
    end = _words(frame, _VARIABLES)[_STACK_POINTER]
    return (end - _address(frame)) // _WORD - _VARIABLES - _n_variables(frame.f_code)


def _address(frame: FrameType) -> int:
    return ctypes.c_size_t.from_address(id(frame) + _INTERPRETER_FRAME).value


def _words(frame: FrameType, count: int) -> list[int]:
    # a type of array for each length would be a cycle of garbage
    return memoryview(ctypes.string_at(_address(frame), count * _WORD)).cast("P").tolist()


def _check_layout() -> None:
    if not _is_as_expected():
        raise TenureError(
            f"Python {sys.version.split()[0]} keeps the variables of functions in a way that this "
            "tenure does not know, so it can't say who holds a tensor. Use Python 3.14 or earlier, "
            "or update tenure."
        )


@functools.cache
def _is_as_expected() -> bool:
    variable = object()
    return _shows(variable, object())


def _shows(lent: object, given: object) -> bool:
    """Return whether the frame of this call shows its arguments, and which adds a reference."""
    # never in a variable: a frame that has itself is a cycle, and keeps the whole stack alive
    words = _words(sys._getframe(), _VARIABLES + 2)
    # the caller's variable is a reference
    is_lent = sys.getrefcount(lent) == SOLE
    shown = words[_FRAME_OBJECT], *words[_VARIABLES:]
    return shown == (id(sys._getframe()), id(lent) | is_lent * _ADDS_NONE, id(given)) and (
        0 <= _n_in_flight(sys._getframe()) <= sys._getframe().f_code.co_stacksize
    )
