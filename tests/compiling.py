"""torch.compile in tests: each begins as in a new process."""

import torch
from torch.utils import _python_dispatch as dispatch


def forget_compiled():
    """Forget what is compiled, and dispatch modes that tests had open on two threads at once.

    torch has one flag for the modes of all threads. If two overlap, it takes one to be open for
    good; up to 2.12 it compiles nothing then.
    """
    torch._dynamo.reset()
    dispatch._is_in_torch_dispatch_mode = False
    dispatch._is_in_any_mode_without_ignore_compile_internals = False
    tell = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:
        tell(False)
