"""What is remembered of running a program whole: how many samples fit, and how many do not."""

from __future__ import annotations

import hashlib
import sys

from ..._memory import meter_for
from ..._sizes import RememberedCall
from .._tape import Tape

_MANY = 1024
# By their hash: a program that is known here must not hold the functions that it calls.
_places: dict[int, str] = {}


def place_of(tape: Tape) -> str:
    """The program, whatever the number of samples: the functions that it calls."""
    functions = tuple([entry.func for entry in tape.entries])
    key = hash(functions)
    if key not in _places:
        if len(_places) >= _MANY:
            _places.clear()
        names = " ".join(getattr(each, "__name__", "") for each in functions)
        _places[key] = hashlib.blake2s(names.encode(), digest_size=8).hexdigest()
    return _places[key]


def remembered_whole(tape: Tape) -> RememberedCall:
    """What is remembered of running the program whole."""
    return RememberedCall(None, sys._getframe(), ("lazy whole", place_of(tape)), None, (), {})


def remembered_values(tape: Tape) -> RememberedCall:
    """What is remembered of running the program in parts for its values."""
    # it holds this frame: a local of who uses it would be a cycle, with all that is recorded
    return RememberedCall(None, sys._getframe(), ("lazy values", place_of(tape)), None, (), {})


def is_unknown(tape: Tape) -> bool:
    """Whether nothing tells if so many samples fit, and a prediction could."""
    record = remembered_whole(tape).known()
    if record is not None and (record.bad is not None or record.ok >= tape.n_samples):
        return False
    devices = {str(leaf.value.device) for leaf in tape.leaves.values()}
    meters = [meter_for(device) for device in devices if device != "meta"]
    return any(meter is not None and meter.measures for meter in meters)


def fails_whole(tape: Tape) -> bool:
    """Whether so many samples are known not to fit."""
    record = remembered_whole(tape).known()
    return record is not None and record.bad is not None and tape.n_samples >= record.bad
