"""What is known of calls that are alike.

Invariant: nothing here holds a tensor of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._label import SHARED, Label
from ._meta import Meta


def _data_label(shape: tuple[int, ...], n_samples: int) -> Label:
    """Where a tensor of data has the samples: where it has that size."""
    dims = [d for d, size in enumerate(shape) if size == n_samples]
    return Label(dims[0]) if dims else SHARED


@dataclass(slots=True, eq=False)
class Shape:
    """What is known of calls that are alike.

    Attributes:
        out: what they give, with an int for each tensor: a place in ``metas``, or below zero for
            one of those that they were given.
        metas: what the tensors are.
        changed: what the tensors that they were given are now, by place among those.
        aliases: for each tensor in ``metas`` the tensor given that it is a view of.
        cuts: which plain tensors are cut with the batch.
        kind: ``"tail"``: wants all of the batch; ``"before"``: makes something of the batch alone,
            and runs first, on all of it; ``""``: only running it on samples tells.
        why: what makes it want all of it.
        is_value: whether they give no tensor, and change none.
        writes_plain: whether they write into a tensor that was not recorded.
        is_hook: whether they want the whole gradient, so that nothing can be split.
    """

    out: Any
    metas: tuple[Meta, ...]
    changed: dict[int, Meta]
    aliases: tuple[int | None, ...]
    cuts: dict[int, Label]
    kind: str
    why: str
    is_value: bool
    writes_plain: bool = False
    is_hook: bool = False
    _before: Shape | None = None

    def as_before(self, n_samples: int) -> Shape:
        """The same where it is made of the batch alone, and so is data like the batch."""
        if self._before is None:
            metas = tuple(meta.like(_data_label(meta.shape, n_samples)) for meta in self.metas)
            self._before = replace(self, metas=metas, kind="before", why="")
        return self._before


HOOK = Shape(
    out=None,
    metas=(),
    changed={},
    aliases=(),
    cuts={},
    kind="tail",
    why="it sees the gradient of the whole batch",
    is_value=False,
    is_hook=True,
)
"""What is known of calls that give no tensor and register a hook."""
