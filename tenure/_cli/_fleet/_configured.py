"""A model of transformers by its configuration alone: its class, its batch, its length.

Nothing is downloaded, and no code is run that a configuration brings.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._errors import CommandError
from tenure._extras import install_command, numbers, require_new_enough
from tenure._text import counted

from .._fitting import first_line, in_a_line

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST_TOKENS = 2048
_IMAGE_PIXELS, _IMAGE_CHANNELS = 224, 3
# of models that take images of any size
_FREE_PIXELS = 448
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# In the order in which a model is looked for that does not say its class: an encoder with a decoder
# is listed among the causal ones as well, and so are encoders.
_KINDS = {
    "IMAGE_CLASSIFICATION": "AutoModelForImageClassification",
    "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
}
_IMAGES, _MIXED = "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT"
# An image has fewer tokens than patches by these factors, along both sides.
_FEWER = ("downsample_factor", "scale_factor", "spatial_merge_size")
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

    def images(self, asked: int | None) -> int:
        """Return how many images are in the text of a sample."""
        return asked or 0 if self.kind != _MIXED or asked is not None else 1

    def notes(self, sequence: int | None, images: int | None) -> list[str]:
        """Return what a reader should know of the figures."""
        notes = []
        takes_images = not self.is_of_images and hasattr(self.config, "vision_config")
        if takes_images and not self.images(images):
            notes.append("the model also takes images; only text is counted")
        if self.images(images) and self._sizes.is_free:
            height, width = self._sizes.pixels
            notes.append(
                f"the model takes images of any size; they are taken to have {height} x {width}"
            )
        if not self.is_of_images and self.longest and self.tokens(sequence) > self.longest:
            notes.append(f"the configuration is for at most {self.longest} tokens")
        if getattr(self.config, "quantization_config", None):
            notes.append("the configuration's weights are quantized; they are counted unquantized")
        if getattr(self.config, "auto_map", None):
            notes.append("the folder's own code is not run; the class of transformers is counted")
        return notes

    def check(self, *, sequence: int | None, generate: int | None, images: int | None) -> None:
        """Refuse what only text has, and images where there are none.

        Raises:
            CommandError: samples are images, or have none, or more than their tokens.
        """
        if images and self.kind != _MIXED:
            raise CommandError("--images is for models of text and images. Leave it out.")
        if self.images(images):
            n_tokens, n_of_images = (
                self.tokens(sequence),
                self.images(images) * self._sizes.n_tokens,
            )
            if n_of_images >= n_tokens:
                raise CommandError(
                    f"The images of a sample are {n_of_images} tokens, and it has {n_tokens}. Give "
                    "a larger --sequence, or --images 0 for text alone."
                )
        for option, given in (("--sequence", sequence), ("--generate", generate)):
            if self.is_of_images and given is not None:
                raise CommandError(f"{option} says nothing of images. Leave it out.")

    def tokens_in_words(self, sequence: int | None, images: int | None) -> str:
        """Spell what a sample is."""
        if self.is_of_images:
            height, width = _image_size(self.config)
            return f"{height} x {width} pixels"
        text = f"{self.tokens(sequence)} tokens"
        if not self.images(images):
            return text
        n_of_images = self.images(images) * self._sizes.n_tokens
        return f"{text} ({n_of_images} of {counted(self.images(images), 'image')})"

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

    def batch(
        self, n_samples: int, n_tokens: int, n_images: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Make what the model is called with in training: all samples, and their labels.

        Models look at ids, so these have data wherever images have none.
        """
        if self.is_of_images:
            height, width = _image_size(self.config)
            channels = getattr(self.config, "num_channels", None) or _IMAGE_CHANNELS
            pixels = torch.zeros(n_samples, channels, height, width, device=device)
            return {"pixel_values": pixels, "labels": torch.zeros(n_samples, dtype=torch.long)}
        text = _of_text(self.config)
        named = [getattr(text, f"{name}_token_id", None) for name in _SPECIAL]
        # of a few models, several end a text
        special = {id_ for each in named for id_ in (each if isinstance(each, list) else [each])}
        token = next(i for i in range(len(special) + 1) if i not in special)
        ids = torch.full((n_samples, n_tokens), token)
        if not n_images:
            return {"input_ids": ids, "labels": ids.clone()}
        sizes = self._sizes
        ids[:, : n_images * sizes.n_tokens] = self._image_token
        made = {
            "input_ids": ids,
            "labels": ids.clone(),
            **sizes.batch(n_samples * n_images, device),
        }
        for name in self._known & {"token_type_ids", "mm_token_type_ids"}:
            made[name] = (ids == self._image_token).long()
        if sizes.is_free:
            # they would be read from values; as long for time, for height and for width
            made["position_ids"] = torch.arange(n_tokens).expand(3, n_samples, -1)
        return made

    @property
    def _image_token(self) -> int:
        names = ("image_token_id", "image_token_index")
        found = [getattr(self.config, name, None) for name in names]
        return next((each for each in found if isinstance(each, int)), -1)

    @property
    def _known(self) -> set[str]:
        """The names of what the model is called with."""
        import transformers

        cls = getattr(transformers, self.config.architectures[0])
        return set(inspect.signature(cls.forward).parameters)

    @property
    def _sizes(self) -> _Images:
        """How large images are that are part of a text, by the configuration.

        Raises:
            CommandError: it does not say.
        """
        vision = self.config.vision_config
        patch, size = (getattr(vision, f"{name}_size", None) for name in ("patch", "image"))
        is_free = "image_grid_thw" in self._known
        if patch is None or (size is None and not is_free) or self._image_token < 0:
            raise CommandError(
                f"The configuration of a {self.config.model_type} does not say how large its "
                "images are. Count its text alone with --images 0."
            )
        patch = patch if isinstance(patch, int) else patch[0]
        fewer = math.prod(
            getattr(each, name, None) or 1 for each in (self.config, vision) for name in _FEWER
        ) / (getattr(self.config, "downsample_ratio", None) or 1)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None)
        frames = getattr(vision, "temporal_patch_size", None) or 1
        height, width = (_FREE_PIXELS, _FREE_PIXELS) if is_free else _image_size(vision)
        return _Images(
            pixels=(height // patch * patch, width // patch * patch),
            patch=patch,
            fewer=fewer,
            channels=(channels or _IMAGE_CHANNELS) * (frames if is_free else 1),
            fixed_tokens=getattr(self.config, "mm_tokens_per_image", None),
            is_free=is_free,
        )


class _Images(NamedTuple):
    """Images inside of texts.

    Attributes:
        pixels: their height and width.
        patch: the pixels along a side of a patch.
        fewer: how many patches along a side are a token.
        channels: of a pixel, frames included.
        fixed_tokens: the tokens of an image, if patches don't tell it.
        is_free: whether patches come one by one, with the number of them along each side.
    """

    pixels: tuple[int, int]
    patch: int
    fewer: float
    channels: int
    fixed_tokens: int | None
    is_free: bool

    @property
    def _grid(self) -> tuple[int, int]:
        """The patches along each side, whole tokens if sides are free."""
        step = int(self.fewer) if self.is_free else 1
        height, width = (pixels // self.patch // step * step for pixels in self.pixels)
        return height, width

    @property
    def n_tokens(self) -> int:
        """How many tokens an image is."""
        height, width = self._grid
        return self.fixed_tokens or round(height * width / self.fewer**2)

    def batch(self, n_images: int, device: torch.device) -> dict[str, Tensor]:
        """Make what the model is called with besides ids."""
        if not self.is_free:
            pixels = torch.zeros(n_images, self.channels, *self.pixels, device=device)
            return {"pixel_values": pixels}
        height, width = self._grid
        patches = n_images * height * width
        pixels = torch.zeros(patches, self.channels * self.patch**2, device=device)
        return {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, height, width]] * n_images),
        }


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
            if kind == _MIXED and not hasattr(config, "vision_config"):
                continue
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
        what = "Name the folder of a model of transformers."
        if is_adapter:
            what = f"It has {_ADAPTER}, so name the folder of its base model."
        raise CommandError(f"The folder {target!r} has no {_CONFIG}. {what}")
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
    homes = (config, getattr(config, "vision_config", None))
    sizes = (getattr(home, "image_size", None) for home in homes)
    size = next(filter(None, sizes), _IMAGE_PIXELS)
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
