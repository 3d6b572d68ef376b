"""Giving the tensors of a checkpoint the names and the form that the model has them in.

Invariant: the library of the model says which tensors become which, and nothing is read for asking.
What a file holds as the model has it is used where it is; the rest is written once, a tensor at a
time, to a nameless file of our own.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._show import progress
from tenure._text import format_bytes, listed

from ._checkpoint import Checkpoint, StoredTensor
from ._files import MappedFile, checked_folder, nameless, writing

# As safetensors' own files; torch needs that of the element.
_ALIGNMENT_BYTES = 64


def convert_names(checkpoint: Checkpoint, model: nn.Module, host: Path | None) -> None:
    """Name a checkpoint's tensors as a model does, where the model knows how.

    Args:
        checkpoint: the checkpoint, which is changed; a file of ours joins its files.
        model: the model.
        host: the folder for that file.

    Raises:
        PagingError: tensors have another form, and there is no folder for them, or no room in it.
    """
    # Names that all fit are the model's own, whatever its library would make of them.
    if checkpoint.tensors.keys() <= model.state_dict().keys():
        return
    asked = _key_map(model, checkpoint.tensors)
    if asked is None:
        return
    renamed, conversions = asked
    if conversions:
        if host is None:
            raise _without_folder(checkpoint, model, conversions)
        with writing(checked_folder(host), type(model).__name__, _n_bytes(checkpoint, conversions)):
            renamed |= _convert(checkpoint, conversions, model, host)
    checkpoint.tensors.clear()
    checkpoint.tensors.update(renamed)


def _convert(
    checkpoint: Checkpoint, conversions: list[_Conversion], model: nn.Module, host: Path
) -> dict[str, StoredTensor]:
    made: dict[str, tuple[int, Tensor]] = {}
    n_bytes = _n_bytes(checkpoint, conversions)
    with nameless(host) as file, progress("converting weights", n_bytes, in_bytes=True) as done:
        for conversion in conversions:
            for name, tensor in _tensors_of(conversion, checkpoint, model):
                # On meta: the shape is needed, and the values would be all of the model in memory.
                made[name] = _append(file, tensor), tensor.to("meta")
            done(_n_bytes(checkpoint, [conversion]))
        file.truncate(max(1, file.tell()))
        file.flush()
        mapped = MappedFile(file, f"The converted weights in {str(host)!r}", is_ours=True)
    checkpoint.files.append(mapped)
    return {
        name: StoredTensor(mapped, offset, like.dtype, tuple(like.shape))
        for name, (offset, like) in made.items()
    }


def _tensors_of(
    conversion: _Conversion, checkpoint: Checkpoint, model: Any
) -> Iterator[tuple[str, Tensor]]:
    target, converter = conversion.target, conversion.converter
    try:
        for name, made in converter.convert(target, model=model, config=model.config).items():
            # What no operation has joined comes as it was collected, in a list of one.
            yield name, made[0] if isinstance(made, list) else made
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
    checkpoint: Checkpoint, model: nn.Module, conversions: list[_Conversion]
) -> PagingError:
    n_bytes = _n_bytes(checkpoint, conversions)
    return PagingError(
        f"{checkpoint.name} holds {len(conversions)} of the tensors of {type(model).__name__} in "
        f"another form, such as {_told(conversions[0])}: {format_bytes(n_bytes)} have to be "
        "written once in the model's own form. Nothing was loaded. Name a folder on a disk for "
        "them, host=Path(...); their file has no name there, and goes with the model."
    )


def _n_bytes(checkpoint: Checkpoint, conversions: list[_Conversion]) -> int:
    names = [name for each in conversions for name in each.sources]
    return sum(checkpoint.tensors[name].n_bytes for name in names)


def _told(conversion: _Conversion) -> str:
    return f"{conversion.target!r} as {listed([*map(repr, conversion.sources)], 1)}"


@dataclass(slots=True)
class _Conversion:
    """Tensors of a file that a model has in another form: joined, split, or laid out differently.

    Attributes:
        target: the name in the model of the first tensor that is made of them.
        converter: of transformers; makes the tensors when it is asked, and reads the file then.
        sources: their names in the file.
    """

    target: str
    converter: Any
    sources: list[str] = field(default_factory=list)


_KeyMap = tuple[dict[str, StoredTensor], list[_Conversion]]
"""The tensors that are the same, by their names in the model; and how the others are made."""


def _key_map(model: nn.Module, tensors: dict[str, StoredTensor]) -> _KeyMap | None:
    """Return the map that a model offers; None where it offers none."""
    patterns = getattr(model, "_checkpoint_conversion_mapping", None)
    if isinstance(patterns, dict) and patterns:
        # Transformers before 5.
        return {_substituted(name, patterns): each for name, each in tensors.items()}, []
    library = _loading_of(model)
    return None if library is None else _asked(model, tensors, *library)


def _substituted(name: str, patterns: dict[str, str]) -> str:
    for pattern, other in patterns.items():
        name, n_changes = re.subn(pattern, other, name)
        if n_changes:
            break
    return name


def _loading_of(model: nn.Module) -> tuple[Any, Any] | None:
    """Return transformers' modules that convert checkpoints, if the model is of its own."""
    if not any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__):
        return None
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        return mapping, importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None


def _asked(model: Any, tensors: dict[str, StoredTensor], mapping: Any, loading: Any) -> _KeyMap:
    """Ask transformers, in the steps of its ``convert_and_load_state_dict_in_model``.

    Args:
        model: a model of transformers.
        tensors: what the file holds.
        mapping: its module ``conversion_mapping``.
        loading: its module ``core_model_loading``.
    """
    state, renamed = model.state_dict(), dict[str, StoredTensor]()
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, collected = model.base_model_prefix, dict[str, _Conversion]()
    # As transformers does: experts are joined in the order in which they come, and the 10th comes
    # after the 9th.
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        # A renaming meant for other checkpoints of the architecture may hit a name that was right.
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if pattern is None or target not in state:
            renamed[target if target in state else name] = tensors[name]
            continue
        # A converter collects the tensors of one target; a pattern stands for many, a layer each.
        if target not in collected:
            collected[target] = _Conversion(target, copy.deepcopy(by_pattern[pattern]))
        # It is called when it is needed.
        collected[target].converter.add_tensor(target, name, pattern, tensors[name].view)
        collected[target].sources.append(name)
    return renamed, list(collected.values())
