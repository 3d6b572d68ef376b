"""Giving the tensors of a checkpoint the names and the form that the model has them in.

Invariant: what a file holds as the model has it is used where it is. The rest is written once, a
tensor at a time, to a nameless file of our own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._text import format_bytes, listed

from .._host import MappedFile, checked_folder, nameless, writing
from ._files import Checkpoint, StoredTensor
from ._key_map import Conversion, key_map

_ALIGNMENT_BYTES = 64  # as safetensors' own files; torch needs that of the element


def convert_names(checkpoint: Checkpoint, model: nn.Module, host: Path | None) -> None:
    """Name a checkpoint's tensors as a model does, where the model knows how.

    Args:
        checkpoint: the checkpoint, which is changed; a file of ours joins its files.
        model: the model.
        host: the folder for that file.

    Raises:
        PagingError: tensors have another form, and there is no folder for them, or no room in it.
    """
    if checkpoint.tensors.keys() <= model.state_dict().keys():
        return
    asked = key_map(model, checkpoint.tensors)
    if asked is None:
        return
    if asked.conversions and host is None:
        raise _without_folder(checkpoint, model, asked.conversions)
    if asked.conversions and host is not None:
        n_bytes = _n_bytes(checkpoint, asked.conversions)
        with writing(checked_folder(host), type(model).__name__, n_bytes):
            asked.renamed.update(_convert(checkpoint, asked.conversions, host))
    checkpoint.tensors.clear()
    checkpoint.tensors.update(asked.renamed)


def _convert(
    checkpoint: Checkpoint, conversions: list[Conversion], host: Path
) -> dict[str, StoredTensor]:
    made: dict[str, tuple[int, Tensor]] = {}
    with nameless(host) as file:
        for conversion in conversions:
            for name, tensor in _tensors_of(conversion, checkpoint):
                made[name] = _append(file, tensor), tensor.to("meta")
        file.truncate(max(1, file.tell()))
        file.flush()
        mapped = MappedFile(file, f"The converted weights in {str(host)!r}", is_ours=True)
    checkpoint.files.append(mapped)
    return {
        name: StoredTensor(mapped, offset, like.dtype, tuple(like.shape))
        for name, (offset, like) in made.items()
    }


def _tensors_of(conversion: Conversion, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from conversion.make().items()
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError) as error:
        raise PagingError(
            f"{checkpoint.name} holds {_told(conversion)}, and they could not be converted: "
            f"{error}. Nothing was loaded. The file may be of another configuration of the model."
        ) from error


def _append(file: BinaryIO, tensor: Tensor) -> int:
    """Write a tensor at the end; where it begins."""
    whole = tensor.detach().contiguous()
    begin = -(-file.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    file.seek(begin)
    if whole.nbytes:
        file.write((ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr()))
    return begin


def _without_folder(
    checkpoint: Checkpoint, model: nn.Module, conversions: list[Conversion]
) -> PagingError:
    n_bytes = _n_bytes(checkpoint, conversions)
    return PagingError(
        f"{checkpoint.name} holds {len(conversions)} of the tensors of {type(model).__name__} in "
        f"another form, such as {_told(conversions[0])}: {format_bytes(n_bytes)} have to be "
        "written once in the model's own form. Nothing was loaded. Name a folder on a disk for "
        "them, host=Path(...); their file has no name there, and goes with the model."
    )


def _n_bytes(checkpoint: Checkpoint, conversions: list[Conversion]) -> int:
    names = [name for each in conversions for name in each.sources]
    return sum(checkpoint.tensors[name].n_bytes for name in names)


def _told(conversion: Conversion) -> str:
    return f"{conversion.target!r} as {listed([*map(repr, conversion.sources)], 1)}"
