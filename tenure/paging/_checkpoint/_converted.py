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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._show import progress
from tenure._text import format_bytes, listed

from .._host import MappedFile, checked_folder, nameless, writing
from ._files import Checkpoint, StoredTensor

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
    if asked.conversions and host is None:
        raise _without_folder(checkpoint, model, asked.conversions)
    if asked.conversions and host is not None:
        n_bytes = _n_bytes(checkpoint, asked.conversions)
        with writing(checked_folder(host), type(model).__name__, n_bytes):
            asked.renamed.update(_convert(checkpoint, asked.conversions, host))
    checkpoint.tensors.clear()
    checkpoint.tensors.update(asked.renamed)


def _convert(
    checkpoint: Checkpoint, conversions: list[_Conversion], host: Path
) -> dict[str, StoredTensor]:
    made: dict[str, tuple[int, Tensor]] = {}
    n_bytes = _n_bytes(checkpoint, conversions)
    with nameless(host) as file, progress("converting weights", n_bytes, in_bytes=True) as done:
        for conversion in conversions:
            for name, tensor in _tensors_of(conversion, checkpoint):
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


def _tensors_of(conversion: _Conversion, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
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
        sources: their names in the file.
        target: the name in the model of the first tensor that is made of them.
        make: makes the tensors, by their names in the model; reads the file.
    """

    sources: list[str]
    target: str
    make: Callable[[], dict[str, Tensor]]


@dataclass(slots=True)
class _KeyMap:
    """How the names of a file become those of a model.

    Attributes:
        renamed: the tensors that are the same, by their names in the model.
        conversions: the others.
    """

    renamed: dict[str, StoredTensor] = field(default_factory=dict)
    conversions: list[_Conversion] = field(default_factory=list)


def _key_map(model: nn.Module, tensors: dict[str, StoredTensor]) -> _KeyMap | None:
    """Return the map that a model offers; None where it offers none."""
    patterns = getattr(model, "_checkpoint_conversion_mapping", None)
    if isinstance(patterns, dict) and patterns:
        # Transformers before 5.
        return _KeyMap({_substituted(name, patterns): each for name, each in tensors.items()})
    library = _loading_of(model)
    return None if library is None else _Asked(model, tensors, *library).map


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


class _Asked:
    """One question to transformers, in the steps of its ``convert_and_load_state_dict_in_model``.

    Args:
        model: a model of transformers.
        tensors: what the file holds.
        mapping: its module ``conversion_mapping``.
        loading: its module ``core_model_loading``.
    """

    def __init__(
        self, model: Any, tensors: dict[str, StoredTensor], mapping: Any, loading: Any
    ) -> None:
        self._model, self._loading = model, loading
        self._state = model.state_dict()
        transforms = mapping.get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        self._by_pattern = {
            pattern: each for each in converters for pattern in each.source_patterns
        }
        self._collected: dict[str, tuple[Any, list[str]]] = {}
        self.map = _KeyMap()
        # As transformers does: experts are joined in the order in which they come, and the 10th
        # comes after the 9th.
        for name in sorted(tensors, key=loading.dot_natural_key):
            self._take(name, tensors[name], renamings, converters)
        self.map.conversions = [
            _Conversion(sources, target, self._making(target, converter))
            for target, (converter, sources) in self._collected.items()
        ]

    def _take(
        self, name: str, stored: StoredTensor, renamings: list[Any], converters: list[Any]
    ) -> None:
        target, pattern = self._renamed(name, renamings, converters)
        # A renaming meant for other checkpoints of the architecture may hit a name that was right.
        if target not in self._state and name in self._state:
            target, pattern = self._renamed(name, [], [])
        if pattern is None or target not in self._state:
            self.map.renamed[target if target in self._state else name] = stored
            return
        # A converter collects the tensors of one target; a pattern stands for many, a layer each.
        converter, sources = self._collected.setdefault(
            target, (copy.deepcopy(self._by_pattern[pattern]), [])
        )
        # It is called when it is needed.
        converter.add_tensor(target, name, pattern, stored.view)
        sources.append(name)

    def _renamed(
        self, name: str, renamings: Iterable[Any], converters: Iterable[Any]
    ) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        found: tuple[str, str | None] = self._loading.rename_source_key(
            name, renamings, converters, prefix, self._state
        )
        return found

    def _making(self, target: str, converter: Any) -> Callable[[], dict[str, Tensor]]:
        def make() -> dict[str, Tensor]:
            made = converter.convert(target, model=self._model, config=self._model.config)
            # What no operation has joined comes as it was collected, in a list of one.
            return {
                name: each[0] if isinstance(each, list) else each for name, each in made.items()
            }

        return make
