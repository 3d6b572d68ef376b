"""A model of transformers by its configuration alone: its class, its batch, its length.

Nothing is downloaded, and no code is run that a configuration brings.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import warnings
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
from ._setup import Setup, checkpoints_of

Batch = dict[str, Tensor]
_MOST_TOKENS = 2048
_PIXELS, _CHANNELS = 224, 3
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


class Images(NamedTuple):
    """The images of a sample.

    Attributes:
        n: how many there are.
        pixels: the height and width of each.
        shape: the shape of ``pixel_values`` for one; those of a batch are joined along the first
            dimension.
        n_tokens: how many tokens of the text one of them is; 0 if there is no text.
        grid: the patches of one in time, height and width, if the model takes images of any size.
    """

    n: int
    pixels: tuple[int, int]
    shape: tuple[int, ...]
    n_tokens: int = 0
    grid: tuple[int, int, int] | None = None


class Configured:
    """A configuration and what follows from it.

    Args:
        setup: names the configuration, and says how large a sample is.

    Attributes:
        config: the configuration.
        longest: the tokens that it is made for, if it says so.
        n_tokens: the tokens of a sample.
        images: the images of a sample; None if it is text alone.
        notes: what a reader should know of the figures.

    Raises:
        CommandError: there is no such model, or the setup asks for samples that it does not have.
    """

    def __init__(self, setup: Setup) -> None:
        self.config, self._kind = _found(setup.target)
        self._text = self.config
        if hasattr(self.config, "get_text_config"):
            self._text = self.config.get_text_config()
        lengths = (getattr(self._text, name, None) for name in _LENGTHS)
        self.longest = next((n for n in lengths if isinstance(n, int) and n > 0), None)
        self.n_tokens = setup.sequence or min(self.longest or _MOST_TOKENS, _MOST_TOKENS)
        is_of_images, is_mixed = self._kind == _IMAGES, self._kind == _MIXED
        for is_wrong, told in (
            (setup.images and not is_mixed, "--images is for models of text and images."),
            (is_of_images and setup.sequence, "--sequence says nothing of images."),
            (is_of_images and setup.generate, "--generate says nothing of images."),
        ):
            if is_wrong:
                raise CommandError(f"{told} Leave it out.")
        self.images: Images | None = None
        if is_of_images:
            size = _image_size(self.config)
            channels = getattr(self.config, "num_channels", None) or _CHANNELS
            self.images = Images(1, size, (1, channels, *size))
        elif is_mixed and setup.images != 0:
            self.images = self._images_in_text(1 if setup.images is None else setup.images)
        notes = {
            "the model also takes images; only text is counted": self.images is None
            and hasattr(self.config, "vision_config"),
            f"the configuration is for at most {self.longest} tokens": not is_of_images
            and self.n_tokens > (self.longest or self.n_tokens),
            "the configuration's weights are quantized; they are counted unquantized": getattr(
                self.config, "quantization_config", None
            ),
            "the folder's own code is not run; the class of transformers is counted": getattr(
                self.config, "auto_map", None
            ),
        }
        self.notes = [note for note, is_so in notes.items() if is_so]
        if self.images is not None and self.images.grid is not None:
            height, width = self.images.pixels
            free = f"the model takes images of any size; they are taken to have {height} x {width}"
            self.notes.insert(0, free)

    def sample_in_words(self) -> str:
        """Spell what a sample is."""
        text, images = f"{self.n_tokens} tokens", self.images
        if images is None:
            return text
        if not images.n_tokens:
            return f"{images.pixels[0]} x {images.pixels[1]} pixels"
        return f"{text} ({images.n * images.n_tokens} of {counted(images.n, 'image')})"

    def model(self, setup: Setup) -> nn.Module:
        """Make the model, where the caller has it: without data, as a rule.

        Raises:
            CommandError: the configuration can't be built, or not with what the setup adds.
        """
        import transformers

        name = "dtype" if numbers(version("transformers")) >= [4, 56] else "torch_dtype"
        chosen = getattr(self.config, name, None) or torch.float32
        dtype = chosen if setup.dtype is None else getattr(torch, setup.dtype)
        told = f"The configuration of a {self.config.model_type} can't be built"
        try:
            home: Any = import_module("transformers.initialization")
        except ImportError:  # before transformers 5
            home = import_module("transformers.modeling_utils")
        with warnings.catch_warnings():
            # what these libraries tell each other of their next releases
            warnings.simplefilter("ignore", FutureWarning)
            # the errors are those of the library, or of whoever wrote the configuration
            try:
                # what draws first numbers looks at them
                with home.no_init_weights():
                    auto = getattr(transformers, _KINDS[self._kind])
                    model: Any = auto.from_config(self.config, **{name: dtype})
                model.tie_weights()
                told = f"peft puts no LoRA into a {type(model).__name__}"
                if setup.lora is not None:
                    import peft

                    lora = peft.LoraConfig(
                        r=setup.lora, lora_alpha=setup.lora, target_modules="all-linear"
                    )
                    model = peft.get_peft_model(model, lora)
                told = f"A {type(model).__name__} has no checkpoints"
                if setup.checkpointing:
                    getattr(model, checkpoints_of(model))({"use_reentrant": False})
                    # of adapters alone no input would lead to a gradient
                    model.enable_input_require_grads()
            except Exception as error:
                if isinstance(error, ImportError) and error.name == "peft":
                    told = "LoRA is that of peft, which is installed by `pip install 'peft>=0.19'`"
                raise CommandError(f"{told}: {in_a_line(error)}.") from None
        made: nn.Module = model.train(setup.generate is None)
        return made

    def batch(self, n_samples: int, device: torch.device) -> Batch:
        """Make what the model is called with in training: all samples, and their labels.

        Models look at ids, so these have data wherever images have none.
        """
        images, made = self.images, Batch()
        if images is not None:
            n_rows = n_samples * images.n * images.shape[0]
            made["pixel_values"] = torch.zeros(n_rows, *images.shape[1:], device=device)
            if not images.n_tokens:
                return {**made, "labels": torch.zeros(n_samples, dtype=torch.long)}
        named = [getattr(self._text, f"{name}_token_id", None) for name in _SPECIAL]
        # of a few models, several end a text
        special = {id_ for each in named for id_ in (each if isinstance(each, list) else [each])}
        token = next(i for i in range(len(special) + 1) if i not in special)
        ids = torch.full((n_samples, self.n_tokens), token)
        if images is not None:
            ids[:, : images.n * images.n_tokens] = self._image_token
            for name in self._known & {"token_type_ids", "mm_token_type_ids"}:
                made[name] = (ids == self._image_token).long()
            if images.grid is not None:
                made["image_grid_thw"] = torch.tensor([images.grid] * (n_samples * images.n))
                # they would be read from values; as long for time, for height and for width
                made["position_ids"] = torch.arange(self.n_tokens).expand(3, n_samples, -1)
        return {"input_ids": ids, "labels": ids.clone(), **made}

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

    def _images_in_text(self, n: int) -> Images:
        """Return how large images are that are part of a text, by the configuration."""
        vision = self.config.vision_config
        patch, size = (getattr(vision, f"{name}_size", None) for name in ("patch", "image"))
        is_free = "image_grid_thw" in self._known
        if patch is None or (size is None and not is_free) or self._image_token < 0:
            raise CommandError(
                f"The configuration of a {self.config.model_type} does not say how large its "
                "images are. Count its text alone with --images 0."
            )
        side = patch if isinstance(patch, int) else patch[0]
        fewer = math.prod(
            getattr(each, name, None) or 1 for each in (self.config, vision) for name in _FEWER
        ) / (getattr(self.config, "downsample_ratio", None) or 1)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None)
        channels = channels or _CHANNELS
        pixels = (_FREE_PIXELS, _FREE_PIXELS) if is_free else _image_size(vision)
        # of patches that come one by one, whole tokens
        step = int(fewer) if is_free else 1
        high, wide = (n_pixels // side // step * step for n_pixels in pixels)
        height, width = (n_pixels // side * side for n_pixels in pixels)
        n_tokens = getattr(self.config, "mm_tokens_per_image", None)
        n_tokens = n_tokens or round(high * wide / fewer**2)
        if n * n_tokens >= self.n_tokens:
            raise CommandError(
                f"The images of a sample are {n * n_tokens} tokens, and it has {self.n_tokens}. "
                "Give a larger --sequence, or --images 0 for text alone."
            )
        if not is_free:
            return Images(n, (height, width), (1, channels, height, width), n_tokens)
        frames = getattr(vision, "temporal_patch_size", None) or 1
        shape = (high * wide, channels * frames * side**2)
        return Images(n, (height, width), shape, n_tokens, (1, high, wide))


def _found(target: str) -> tuple[Any, str]:
    """Read a configuration, and find what its model does, as transformers names lists of classes.

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
    kinds: dict[str, tuple[str, ...]] = {}
    for kind in _KINDS:
        names = getattr(lists, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(config.model_type, ())
        if kind != _MIXED or hasattr(config, "vision_config"):
            kinds[kind] = (names,) if isinstance(names, str) else names
    of_name = (kind for kind, names in kinds.items() if named in names)
    found = next(of_name, next((kind for kind, names in kinds.items() if names), None))
    if found is None:
        raise CommandError(
            f"A {config.model_type} has no class that is trained on text, on pairs of text or on "
            "images. Write a function that makes it, and ask with MODULE:FUNCTION."
        )
    # of a type with several classes, transformers asks for the name
    config.architectures = [named if named in kinds[found] else kinds[found][0]]
    return config, found


def _read(target: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    is_folder = os.path.isdir(target)
    path = os.path.join(target, "config.json") if is_folder else target
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
            refused = f"{path!r} is refused by transformers: {first_line(error)}."
            raise CommandError(refused) from None
    if is_folder and os.path.isfile(os.path.join(target, adapter := "adapter_config.json")):
        what = f"It has {adapter}, so name the folder of its base model."
    else:
        what = "Name the folder of a model of transformers."
    if is_folder:
        raise CommandError(f"The folder {target!r} has no config.json. {what}")
    if target.endswith(".json") or target.startswith((".", os.sep)):
        raise CommandError(f"There is no file {target!r}.")
    try:
        return AutoConfig.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{target!r} is no folder, no file, no MODULE:FUNCTION, and not in the local cache of "
            f"transformers ({first_line(error)}). Nothing is downloaded here."
        ) from None


def _image_size(config: Any) -> tuple[int, int]:
    homes = (config, getattr(config, "vision_config", None))
    sizes = (getattr(home, "image_size", None) for home in homes)
    size = next(filter(None, sizes), _PIXELS)
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
