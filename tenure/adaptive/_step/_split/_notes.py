"""What an error of the user's function is given to say: that it ran on a part, or what it gets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tenure._errors import TenureError
from tenure._oom import oom_info
from tenure._text import describe_tensor, listed, shape_of

_MOST_NAMED = 3
_CALL_OF_MODULES = "_call_impl"
"""The function of torch in which a module calls its ``forward``."""


def tell_of_part(
    error: Exception, length: int, n_samples: int, outside: Mapping[str, Tensor]
) -> None:
    """Note on an error that the function ran on a part of the batch, where it is not told already.

    Args:
        error: what the function raised.
        length: the samples that it got.
        n_samples: the samples of the batch.
        outside: tensors of any shape that it takes from elsewhere than the batch, by name.
    """
    if isinstance(error, TenureError) or oom_info(error) is not None:
        return
    found = [
        f"{name} ({describe_tensor(each)})"
        for name, each in outside.items()
        if shape_of(each)[:1] == (n_samples,)
    ]
    named = f": {listed(found, _MOST_NAMED)}" if found else ""
    error.add_note(
        f"step() ran the function on {length} of {n_samples} samples. Tensors that it takes from "
        f"outside were not split{named}. Pass them in the batch, as in step(fn, (x, y))."
    )


def tell_of_arguments(error: TypeError, entry: str) -> None:
    """Note on an error of the call itself, as of a function of two arguments, what is passed."""
    at, depth = error.__traceback__, 0
    while at is not None and at.tb_next is not None:
        at, depth = at.tb_next, depth + 1
    # one of a frame farther in is of the user's own code, or of code that it calls
    if at is None or (depth and at.tb_frame.f_code.co_name != _CALL_OF_MODULES):
        return
    error.add_note(
        f"The function of {entry}() gets one argument, the batch, as it was passed: let it take "
        "that apart, as in step(lambda batch: loss(model(batch[0]), batch[1]), (x, y))."
    )
