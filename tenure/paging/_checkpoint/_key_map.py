"""What a model's own library calls the tensors of a checkpoint, and what it makes of several.

Invariant: the library's own code says which tensors become which. Nothing is read for asking.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ._files import StoredTensor


@dataclass(slots=True)
class Conversion:
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
class KeyMap:
    """How the names of a file become those of a model.

    Attributes:
        renamed: the tensors that are the same, by their names in the model.
        conversions: the others.
    """

    renamed: dict[str, StoredTensor] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)


def key_map(model: nn.Module, tensors: dict[str, StoredTensor]) -> KeyMap | None:
    """The map that a model offers; None where it offers none."""
    patterns = getattr(model, "_checkpoint_conversion_mapping", None)
    if isinstance(patterns, dict) and patterns:
        # Transformers before 5.
        return KeyMap({_substituted(name, patterns): each for name, each in tensors.items()})
    library = _loading_of(model)
    return None if library is None else _Asked(model, tensors, *library).map


def _substituted(name: str, patterns: dict[str, str]) -> str:
    for pattern, other in patterns.items():
        name, n_changes = re.subn(pattern, other, name)
        if n_changes:
            break
    return name


def _loading_of(model: nn.Module) -> tuple[Any, Any] | None:
    """The modules of transformers that convert checkpoints, where the model is one of its own."""
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
        self.map = KeyMap()
        # As transformers does: experts are joined in the order in which they come, and the 10th
        # comes after the 9th.
        for name in sorted(tensors, key=loading.dot_natural_key):
            self._take(name, tensors[name], renamings, converters)
        self.map.conversions = [
            Conversion(sources, target, self._making(target, converter))
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
