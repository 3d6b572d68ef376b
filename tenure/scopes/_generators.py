"""Scopes in generators: a plain block stays current while its generator is suspended.

That captures what the consumer makes, which is seldom meant; so such a block warns. Context
managers written as generators are exempt: there it is meant.
"""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

from tenure._callers import module_of
from tenure._errors import ScopeUsageWarning

SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""The flags of code objects whose frames can be suspended at a yield."""
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio")


def warn_in_generator(frame: FrameType, scope: object) -> None:
    """Warn that ``frame``, in which ``scope`` was just opened, can be suspended with it."""
    driver = frame.f_back
    if driver is not None and module_of(driver).startswith(_DRIVERS):
        return
    warnings.warn(
        f"{scope!r} was opened inside the generator {frame.f_code.co_qualname}(); while that is "
        "suspended the scope stays current and owns what its consumer makes. Decorate the "
        "generator with @scoped, which suspends its scope at each yield, or close it before.",
        ScopeUsageWarning,
        stacklevel=3,
    )
