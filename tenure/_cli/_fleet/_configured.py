"""A model of transformers by its configuration alone: its class, its batch, its length.

Nothing is downloaded, and no code is run that a configuration brings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._errors import CommandError
from tenure._extras import install_command, numbers, require_new_enough

from .._fitting import first_line, in_a_line

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST_TOKENS = 2048
_IMAGE_PIXELS, _IMAGE_CHANNELS = 224, 3
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# In the order in which a model is looked for that does not say its class: an encoder with a decoder
# is listed among the causal ones as well, and so are encoders.
_KINDS = {
    "IMAGE_CLASSIFICATION": "AutoModelForImageClassification",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
}
_IMAGES = "IMAGE_CLASSIFICATION"
_SPECIAL = ("pad", "bos", "eos", "decoder_start")


class Configured(NamedTuple):
    """A configuration and what follows from it.

    Attributes:
        config: the configuration.
        kind: what the model does, as transformers names its lists of classes.
        longest: the tokens that it is made for, if it says so.
    """

    config: Any
    kind: str
    longest: int | None

    @property
    def is_of_images(self) -> bool:
        """True if samples are images."""
        return self.kind == _IMAGES

    def notes(self, sequence: int | None) -> list[str]:
        """Return what a reader should know of the figures."""
        notes = []
        if not self.is_of_images and hasattr(self.config, "vision_config"):
            notes.append("the model also takes images; only text is counted")
        if not self.is_of_images and self.longest and self.tokens(sequence) > self.longest:
            notes.append(f"the configuration is for at most {self.longest} tokens")
        return notes

    def check(self, *, sequence: int | None, generate: int | None) -> None:
        """Refuse what only text has.

        Raises:
            CommandError: samples are images.
        """
        for option, given in (("--sequence", sequence), ("--generate", generate)):
            if self.is_of_images and given is not None:
                raise CommandError(f"{option} says nothing of images. Leave it out.")

    def tokens_in_words(self, sequence: int | None) -> str:
        """Spell what a sample is."""
        if self.is_of_images:
            height, width = _image_size(self.config)
            return f"{height} x {width} pixels"
        return f"{self.tokens(sequence)} tokens"

    def tokens(self, asked: int | None) -> int:
        """Return how many tokens a sample has."""
        return asked or min(self.longest or _MOST_TOKENS, _MOST_TOKENS)

    def model(self, dtype: torch.dtype | None) -> nn.Module:
        """Make the model, where the caller has it: without data, as a rule.

        Raises:
            CommandError: the configuration can't be built.
        """
        import transformers

        name = "dtype" if numbers(version("transformers")) >= [4, 56] else "torch_dtype"
        chosen = dtype or getattr(self.config, name, None) or torch.float32
        try:
            auto = getattr(transformers, _KINDS[self.kind])
            # what draws first numbers looks at them
            with _no_first_numbers():
                made: Any = auto.from_config(self.config, **{name: chosen})
            made.tie_weights()
        # of the library, or of whoever wrote the configuration
        except Exception as error:
            raise CommandError(
                f"The configuration of a {self.config.model_type} can't be built: "
                f"{in_a_line(error)}."
            ) from None
        return made  # type: ignore[no-any-return]  # a PreTrainedModel

    def batch(self, n_samples: int, n_tokens: int, device: torch.device) -> dict[str, Tensor]:
        """Make what the model is called with in training: all samples, and their labels.

        Models look at ids, so these have data wherever images have none.
        """
        if self.is_of_images:
            height, width = _image_size(self.config)
            channels = getattr(self.config, "num_channels", None) or _IMAGE_CHANNELS
            pixels = torch.zeros(n_samples, channels, height, width, device=device)
            return {"pixel_values": pixels, "labels": torch.zeros(n_samples, dtype=torch.long)}
        text = _of_text(self.config)
        special = {getattr(text, f"{name}_token_id", None) for name in _SPECIAL}
        token = next(i for i in range(len(special) + 1) if i not in special)
        ids = torch.full((n_samples, n_tokens), token)
        return {"input_ids": ids, "labels": ids.clone()}


def configured(target: str) -> Configured:
    """Read a configuration.

    Args:
        target: a folder, the path of a JSON file, or a name in the cache of transformers.

    Raises:
        CommandError: there is none, or no model of it can be trained on text or images.
    """
    try:
        require_new_enough("transformers")
        import transformers.models.auto.modeling_auto as lists
    except ImportError as error:
        raise CommandError(
            f"A model without a program is one of transformers, which can't be imported: {error}. "
            f"Install it with: {install_command('transformers')}."
        ) from None
    config = _read(target)
    named = (getattr(config, "architectures", None) or [None])[0]
    for is_named in (True, False):
        for kind in _KINDS:
            names = getattr(lists, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(config.model_type, ())
            names = (names,) if isinstance(names, str) else names
            if named in names if is_named else names:
                # of a type with several classes, transformers asks for the name
                config.architectures = [named if is_named else names[0]]
                return Configured(config, kind, _longest(config))
    raise CommandError(
        f"A {config.model_type} has no class that is trained on text, on pairs of text or on "
        "images. Write a function that makes it, and ask with MODULE:FUNCTION."
    )


def _read(target: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    path = os.path.join(target, _CONFIG) if os.path.isdir(target) else target
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
        except (OSError, ValueError) as error:
            raise CommandError(f"{path!r} can't be read as JSON: {error}.") from None
        model_type = told.get("model_type") if isinstance(told, Mapping) else None
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
            said = f"names the type {model_type!r}" if model_type else 'has no "model_type"'
            raise CommandError(
                f"{path!r} {said}, of which transformers {version('transformers')} makes no model."
            )
        try:
            return CONFIG_MAPPING[model_type].from_dict(dict(told))
        # each class checks its values in its own way
        except Exception as error:
            told = first_line(error)
            raise CommandError(f"{path!r} is refused by transformers: {told}.") from None
    if os.path.isdir(target):
        is_adapter = os.path.isfile(os.path.join(target, _ADAPTER))
        what = f"only {_ADAPTER}: name the folder of its base model" if is_adapter else "no model"
        raise CommandError(f"The folder {target!r} has no {_CONFIG}, {what}.")
    if target.endswith(".json") or target.startswith((".", os.sep)):
        raise CommandError(f"There is no file {target!r}.")
    try:
        return AutoConfig.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{target!r} is no folder, no file, no MODULE:FUNCTION, and not in the local cache of "
            f"transformers ({first_line(error)}). Nothing is downloaded here."
        ) from None


def _no_first_numbers() -> Any:
    """Return a block in which models of transformers leave their weights as they were made."""
    try:
        home: Any = import_module("transformers.initialization")
    except ImportError:  # before transformers 5
        home = import_module("transformers.modeling_utils")
    return home.no_init_weights()


def _of_text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _longest(config: Any) -> int | None:
    text = _of_text(config)
    found = [getattr(text, name, None) for name in _LENGTHS]
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or _IMAGE_PIXELS
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
