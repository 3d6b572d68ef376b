"""Where a tensor has its samples.

Invariant: a label that says where the samples are is right for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor


class Label(NamedTuple):
    """What a tensor has to do with the samples of the batch.

    Attributes:
        kind: ``"shared"``: nothing; ``"batch"``: it has a part for each; ``"sum"``, ``"mean"`` and
            ``"counted"``: it is a number, reduced over them; ``"mixed"``: anything else.
        dim: where the parts are.
        outer: how often that dimension runs through all samples.
        inner: how many elements in a row belong to one.
    """

    kind: str
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_batch(self) -> bool:
        """Whether each sample has a part of it."""
        return self.kind == "batch"

    def size(self, n_samples: int) -> int:
        """The size of the dimension for so many samples."""
        return self.outer * n_samples * self.inner


SHARED = Label("shared")


MIXED = Label("mixed")


Bound = dict[str, Any]


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        name: the operator's.
        args: its arguments by name.
        out: what it returned.
        n: the number of samples.
        is_pointwise: whether torch says that it works on each element alone.
    """

    name: str
    args: Bound
    out: Any
    n: int
    is_pointwise: bool

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return list(tensors_in(self.args.values()))

    def labelled(self) -> list[Tensor]:
        """Those that have samples."""
        return [t for t in self.tensors() if label_of(t).is_batch]


Rule = Callable[[Call], Label | list[Label] | None]
"""Where the results of an operator have their samples; None where it mixes them."""


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in some values, and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def label_of(tensor: Any) -> Label:
    """The label that a tensor was given."""
    label: Label = getattr(tensor, "_tenure_label", SHARED)
    return label


def set_label(tensor: Any, label: Label) -> None:
    """Give a tensor its label; it has to have as many parts as the label says."""
    tensor._tenure_label = label
