"""Deterministic tensor lifetimes for PyTorch.

Importing this imports nothing else: torch comes with the first name that needs it.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import adaptive as adaptive
    from . import paging as paging
    from . import profiler as profiler
    from . import scopes as scopes
    from . import testing as testing
    from ._errors import ByteSizeError as ByteSizeError
    from ._errors import DisposedTensorError as DisposedTensorError
    from ._errors import MissingTorchNameError as MissingTorchNameError
    from ._errors import ReportFormatError as ReportFormatError
    from ._errors import ScopeLeakError as ScopeLeakError
    from ._errors import ScopeUsageError as ScopeUsageError
    from ._errors import ScopeUsageWarning as ScopeUsageWarning
    from ._errors import TenureError as TenureError
    from ._errors import TenureWarning as TenureWarning
    from .scopes import DisposeScope as DisposeScope
    from .scopes import LeakRecord as LeakRecord
    from .scopes import LeakReport as LeakReport
    from .scopes import NewDisposeScope as NewDisposeScope
    from .scopes import ScopeStatistics as ScopeStatistics
    from .scopes import attach_to_scope as attach_to_scope
    from .scopes import current_scope as current_scope
    from .scopes import detach_from_scope as detach_from_scope
    from .scopes import dispose as dispose
    from .scopes import is_disposed as is_disposed
    from .scopes import move_to as move_to
    from .scopes import move_to_outer as move_to_outer
    from .scopes import owner_of as owner_of
    from .scopes import persist as persist
    from .scopes import scoped as scoped
    from .scopes import statistics as statistics

__version__ = "0.1.0"

_ROOMS = ("adaptive", "paging", "profiler", "scopes", "testing")
_NAMES = {
    "tenure._errors": (
        "ByteSizeError", "DisposedTensorError", "MissingTorchNameError", "ReportFormatError",
        "ScopeLeakError", "ScopeUsageError", "ScopeUsageWarning", "TenureError", "TenureWarning",
    ),
    "tenure.scopes": (
        "DisposeScope", "LeakRecord", "LeakReport", "NewDisposeScope", "ScopeStatistics",
        "attach_to_scope", "current_scope", "detach_from_scope", "dispose", "is_disposed",
        "move_to", "move_to_outer", "owner_of", "persist", "scoped", "statistics",
    ),
}  # fmt: skip
# no name of its package, which the command line imports before torch
_MAGICS = "tenure._cli._cell"
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [*_ROOMS, *_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return _import_module(f"tenure.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tenure' has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: object) -> None:
    """Add ``%mlrun``, ``%%mlrun`` and ``%%tenure``; IPython calls this for ``%load_ext tenure``."""
    _import_module(_MAGICS).load_ipython_extension(shell)


def unload_ipython_extension(shell: object) -> None:
    """Take the magics away again; IPython calls this for ``%unload_ext tenure``."""
    _import_module(_MAGICS).unload_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
