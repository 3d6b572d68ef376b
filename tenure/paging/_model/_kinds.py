"""Kinds of tensors: plain ones, those that are made of plain ones, and others.

A quantized weight is a tensor of a class of its own around plain ones, its numbers and its scales.
These are paged, and what a forward reads is made anew around their copies.

Invariant: what counts as made of plain tensors has shown that another can be made around others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor, nn

from tenure._storages import named_inner_tensors
from tenure._torch.quiet import aside_with_subclasses
from tenure._torch.storages import byte_range

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(tensor: Tensor) -> bool:
    """Return whether its bytes in a storage are all there is to it."""
    return (
        # A subclass may be made of several tensors, as quantized weights are, or mean something
        # else by its bytes; a conjugated one is the bytes of another.
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors inside a tensor, by path; none if it can't be rebuilt."""
    # A class may refuse anything, in any way.
    try:
        found = dict(_parts(tensor))
        return found if found and _can_be_made_anew(tensor) else {}
    except Exception:
        return {}


def made_around(tensor: Tensor, instead: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same class around different plain tensors.

    Args:
        tensor: as of ``parts_of``, or a view of such a one.
        instead: gives what stands for a plain tensor, or for an empty one.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = {name: getattr(tensor, name) for name in names}
    parts = {
        name: instead(each) if _is_leaf(each) else made_around(each, instead)
        for name, each in inside.items()
    }
    made: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.size(), tensor.stride()
    )
    return made


def _parts(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside = named_inner_tensors(tensor)
    # A DTensor names its mesh, too, which has another part of it on each rank; and what makes a
    # tensor each time it is asked has no bytes that could be moved.
    if len(inside) != len(names) or any(getattr(tensor, name) is not each for name, each in inside):
        raise TypeError(type(tensor))
    for name, each in inside:
        if is_plain(each):
            yield f"{path}{name}", each
        elif not _is_leaf(each):
            yield from _parts(each, f"{path}{name}.")


def _is_leaf(tensor: Tensor) -> bool:
    return is_plain(tensor) or (type(tensor) in _PLAIN and not tensor.numel())


def _can_be_made_anew(tensor: Tensor) -> bool:
    """Return whether rebuilding gives the same tensor, on the device of its parts."""
    places = count(1)

    def beside_others(part: Tensor) -> Tensor:
        # As in a page, where each part begins elsewhere in one storage, which a class may refuse.
        start, (first, end) = next(places), byte_range(part) if part.numel() else (0, 0)
        room = start + (end - first) // part.element_size()
        memory = torch.empty(room, dtype=part.dtype, device="meta")
        return memory.as_strided(part.size(), part.stride(), start)

    with aside_with_subclasses():
        made = made_around(tensor, beside_others)
        forms = [(type(t), t.dtype, t.size(), t.stride(), t.layout) for t in (tensor, made)]
        return forms[0] == forms[1] and made.device.type == "meta"
