"""Who holds a tensor or a module, with a balance of the references that proves the answer whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tenure._callers import created_at
from tenure._errors import DisposedTensorError, ProfilerUsageError
from tenure._heap import is_kind, type_name, weigh_holders
from tenure._show import Paragraph, Part, Shown
from tenure._text import counted, describe_tensor, format_bytes

from ._naming import named_tensors_of
from ._parts import parts_of


class HolderList(list[str], Shown):
    """The names of what holds a tensor or a module, the shortest first.

    It is a list like any other: a change of it shows when it is printed. A slice or a copy is a
    plain list of the names.

    Attributes:
        n_references: how many references there are to the object, without those of this library.
        n_unexplained: how many of them have no name; the last name then says so.
        tensor: the tensor or module in words.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        n_references: int = 0,
        n_unexplained: int = 0,
        tensor: str = "a tensor",
    ) -> None:
        super().__init__(names)
        self.n_references = n_references
        self.n_unexplained = n_unexplained
        self.tensor = tensor

    def summary(self) -> str:
        """Return the tensor or module and the balance of its references, in one line."""
        explained = self.n_references - self.n_unexplained
        balance = f"{explained} explained, {self.n_unexplained} unexplained"
        return f"{self.tensor}: {counted(self.n_references, 'reference')}, {balance}"

    def _parts(self) -> list[Part]:
        names = "".join(f"\n  {name}" for name in self)
        return [Paragraph("", f"{self.summary()}{':' if self else '.'}{names}")]


def holders(target: Tensor | nn.Module) -> HolderList:
    """Name everything that keeps a tensor or a module alive, with a few passes over the heap.

    Local variables of every running function and thread, globals, attributes, containers,
    closures, defaults, generators, tracebacks, partials, context variables, NumPy arrays (of
    objects too), views and graphs of autograd are named. No operation runs, no unpack hook, and no
    code of the objects that are read.

    Args:
        target: a tensor of any shape, dtype, layout and device, also one that a scope let go; or a
            module. What has the module's parameters without the module is asked of a parameter.

    Returns:
        A list of names, such as ``train.<locals>.history[3]``; printed, it begins with the balance
        of references. What shares a tensor's memory under another handle (views, arrays, a detached
        twin that autograd saved) is named too, and is no reference to this one.

    Raises:
        ProfilerUsageError: the argument is neither a tensor nor a module.

    Example:
        >>> import torch
        >>> from tenure.profiler import holders
        >>> history = [torch.ones(3)]
        >>> found = holders(history[0])  # of a script, ['__main__.history[0]']
        >>> found.summary()
        'float32[3] on cpu, 12 B: 1 reference, 1 explained, 0 unexplained'
    """
    if not is_kind(type(target), Tensor, nn.Module):
        raise ProfilerUsageError(
            f"holders() wants a tensor or a module, and got {type(target).__name__}. Pass the "
            "tensor or the module itself."
        )
    named, balance = weigh_holders(target)
    return HolderList(
        (holder.chain for holder in named),
        n_references=balance.references,
        n_unexplained=balance.unexplained,
        tensor=_spelled(target),
    )


def _spelled(found: Any) -> str:
    # By class and not with isinstance: a lazy proxy of a user answers that with code of its own.
    if is_kind(type(found), nn.Module):
        tensors = {id(t): t for _, _, t in named_tensors_of(found)}
        # Tied weights are one storage, and count once.
        storages = {part.key: part.n_bytes for t in tensors.values() for part in parts_of(t)}
        size = format_bytes(sum(storages.values()))
        return f"{type_name(type(found))} with {counted(len(tensors), 'tensor')}, {size}"
    try:
        text = describe_tensor(found)
    except DisposedTensorError:
        # its repr says what it was, and where it was made
        return repr(found)
    site = created_at(found)
    return text + (f", created at {site}" if site else "")
