"""Who holds a tensor, with a balance of the references that proves the answer whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from tenure._describe import describe_tensor
from tenure._errors import DisposedTensorError, ProfilerUsageError
from tenure._heap import is_kind, weigh_holders
from tenure._sited import created_at

from ._tables import Column, html_table, rich_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = (Column("held by"), Column("kind"))


class HolderList(list[str]):
    """The names of what holds a tensor, the shortest first.

    Attributes:
        kinds: for each name its kind: "frame-local", "global", "attribute", "container", "closure",
            "default", "generator", "thread", "traceback", "partial", "method", "cache", "numpy",
            "view", "autograd", "cycle" or "unknown".
        n_references: how many references there are to the handle, without those of this library.
        n_unexplained: how many of them have no name; the last name then says so.
        tensor: the tensor in words.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        kinds: tuple[str, ...] = (),
        n_references: int = 0,
        n_unexplained: int = 0,
        tensor: str = "a tensor",
    ) -> None:
        super().__init__(names)
        self.kinds = kinds
        self.n_references = n_references
        self.n_unexplained = n_unexplained
        self.tensor = tensor

    def __str__(self) -> str:
        return "\n".join((f"{self.summary()}{':' if self else '.'}", *(f"  {n}" for n in self)))

    def __rich__(self) -> RenderableType:
        return rich_table(self.summary(), _COLUMNS, self._rows())

    def _repr_html_(self) -> str:
        return html_table(self.summary(), _COLUMNS, self._rows())

    def summary(self) -> str:
        """The tensor and the balance of its references, in one line."""
        noun = "reference" if self.n_references == 1 else "references"
        explained = self.n_references - self.n_unexplained
        balance = f"{explained} explained, {self.n_unexplained} unexplained"
        return f"{self.tensor}: {self.n_references} {noun}, {balance}"

    def _rows(self) -> list[tuple[str, str]]:
        return list(zip(self, self.kinds, strict=True))


def holders(t: Tensor) -> HolderList:
    """Name everything that keeps a tensor alive, with a few passes over the heap.

    Local variables of every running function and thread, globals, attributes, containers,
    closures, defaults, generators, tracebacks, partials, NumPy arrays, views and graphs of autograd
    are named. No operation runs, no unpack hook, and no code of the objects that are read.

    Args:
        t: a tensor of any shape, dtype, layout and device, also one that a scope let go.

    Returns:
        A list of names, such as ``train.<locals>.history[3]``; printed, it begins with the balance
        of references. What shares the memory under another handle (views, arrays, a detached twin
        that autograd saved) is named too, and is no reference to this one.

    Raises:
        ProfilerUsageError: the argument is no tensor.

    Example:
        >>> import torch
        >>> from tenure.profiler import holders
        >>> history = [torch.ones(3)]
        >>> holders(history[0])
        ["...history...[0]"]
    """
    if not is_kind(type(t), Tensor):
        raise ProfilerUsageError(
            f"holders() wants a tensor, and got {type(t).__name__}. Pass the tensor itself."
        )
    found, balance = weigh_holders(t)
    return HolderList(
        (holder.chain for holder in found),
        kinds=tuple(holder.kind for holder in found),
        n_references=balance.references,
        n_unexplained=balance.unexplained,
        tensor=_spelled(t),
    )


def _spelled(t: Tensor) -> str:
    try:
        text = describe_tensor(t)
    except DisposedTensorError:
        return repr(t)  # which says what it was, and where it was made
    site = created_at(t)
    return text + (f", created at {site}" if site else "")
