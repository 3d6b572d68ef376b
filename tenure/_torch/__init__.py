"""Every private name of torch; a missing one stops only what needs it, in one clear sentence.

Invariant: importing tenure never fails for a name that torch has dropped. What is bound here is
torch's own object, so that it costs a call nothing; or, where torch has none, what raises at its
first use. Nothing else in tenure says a private name of torch: the tests in
``tests/torch/test_private_names.py`` read the source for it, and take names away by their purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from tenure._errors import MissingTorchNameError

from .counting import require as require_counts


def bound(path: str, purpose: str) -> Any:
    """Return torch's object of a private name.

    Args:
        path: the name from ``torch`` on; modules on the way are ones that torch has imported.
        purpose: what of tenure does not work without it.

    Returns:
        The object itself; where there is none, one that raises a MissingTorchNameError when it is
        called, asked for an attribute, or for an instance of it.
    """
    found = optional(path)
    return _stand_in(path, purpose) if found is None else found


def optional(path: str) -> Any:
    """Return torch's object of a private name; None if torch lacks it, because it is optional."""
    found: Any = torch
    walked = "torch"
    for name in path.split(".")[1:]:
        walked += f".{name}"
        # some packages of torch drop the names of their modules
        found = getattr(found, name, sys.modules.get(walked))
    return found


def getter(path: str, purpose: str) -> Callable[[Any], Any]:
    """Return a function that reads a private attribute; it raises if the class lacks it.

    Args:
        path: the class and the attribute.
        purpose: as for `bound`.
    """
    owner, _, name = path.rpartition(".")
    cls = optional(owner)
    # what an instance gets when it is made is only annotated in its class
    known = hasattr(cls, name) or name in getattr(cls, "__annotations__", ())
    return attrgetter(name) if known else _stand_in(path, purpose)


def refuse(path: str, purpose: str) -> NoReturn:
    """Say that a private name is needed and missing.

    Raises:
        MissingTorchNameError: always.
    """
    raise MissingTorchNameError(
        f"torch {torch.__version__} has no {path}, a private name that tenure needs for {purpose}. "
        "Only that is lost. Install a torch that this tenure is tested with (see constraints.txt), "
        "or update tenure.",
        path,
    )


def require(*names: object) -> None:
    """Make sure of what `bound` gave, where something would be left half done without it.

    Raises:
        MissingTorchNameError: one of them is missing.
    """
    for name in names:
        if isinstance(name, _StandIn):
            name()


class _StandIn(type):
    """The class of what stands in for a name that is gone: whatever is asked of it raises.

    Those are classes, because some names are bases of classes of ours, which are made at import.
    """

    _path: str
    _purpose: str

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self._path, self._purpose)

    __call__ = __getattr__ = __instancecheck__ = __subclasscheck__ = _refuse


def _stand_in(path: str, purpose: str) -> Any:
    return _StandIn("Missing", (), {"_path": path, "_purpose": purpose})


require_counts()
