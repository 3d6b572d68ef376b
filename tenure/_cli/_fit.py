"""The verb that says whether work fits on a device, without running it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from tenure._errors import CommandError

from ._verb import Verb, byte_size, show, whole_number

_FITS, _DOES_NOT = 0, 1
_OPTIMIZERS = ("adamw", "adamw-foreach", "sgd", "adafactor", "paged", "none")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHARDS = ("fsdp2", "ddp")
_OF_TENSORS = ("tp", "tensor", "tensor-parallel", "tensor_parallel", "tensorparallel")


class Fit(Verb):
    """Predict whether a model, or the step of a function, fits into the memory of a device.

    Nothing is downloaded or computed: the step runs on tensors without data, so even a huge model
    takes no memory. Only the ids of a text are allocated. You need neither the device nor the
    weights.

    MODEL is a folder with a config.json of transformers, the path of such a file, or a name in its
    local cache. The options choose how the model is trained, or how many tokens it generates.

    FUNCTION takes no arguments and returns (fn, batch) or (fn, batch, optimizer). A step is
    fn(batch), the backward pass of its result, and a step of the optimizer. MODULE is a dotted
    name, searched in this directory first, or the path of a .py file. If the batch does not fit,
    the step is predicted about 20 times to find the largest that does; with a large model each
    takes a second or two.

    Examples:
      tenure fit ./Llama-3-8B --batch 4 --sequence 2048 --device-memory 24GiB,80GiB
      tenure fit ./Llama-3-70B --ranks 8,64 --checkpointing --device-memory 80GiB
      tenure fit ./Llama-3-8B --generate 512 --device-memory 24GiB
      tenure fit train.py:setup --device-memory 24GiB

    Exit code: 0 if the step fits into all sizes that you name, or if there is no size to compare
    with; 1 if it does not fit; 2 after an error, also one of FUNCTION or of the step.
    """

    name = "fit"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        parser.add_argument(
            "target",
            metavar="MODEL|MODULE:FUNCTION",
            help="such as ./Llama-3-8B, or train.py:setup",
        )
        parser.add_argument(
            "--device-memory",
            action="extend",
            type=_byte_sizes,
            metavar="SIZE[,SIZE]",
            help="memory of the device, such as 24GiB (default: free memory of the accelerator, if "
            "there is one)",
        )
        parser.add_argument(
            "--device",
            type=_device_name,
            metavar="DEVICE",
            help="the type of device (default: cuda for a MODEL and with --device-memory, else the "
            "accelerator, else the device of the tensors)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        cls._add_options_of_models(parser.add_argument_group("for a MODEL"))

    @classmethod
    def _add_options_of_models(cls, group: Any) -> None:
        count = whole_number(1)
        group.add_argument(
            "--batch", type=count, metavar="N", help="samples on each rank (default: 1)"
        )
        group.add_argument(
            "--sequence",
            type=count,
            metavar="N",
            help="tokens of a sample (default: the longest the model is made for, at most 2048)",
        )
        group.add_argument(
            "--images",
            type=whole_number(0),
            metavar="N",
            help="images in the text of a sample, for models that take both (default: 1; of 448 x "
            "448 pixels if the model takes images of any size)",
        )
        group.add_argument(
            "--dtype",
            choices=_DTYPES,
            help="dtype of the weights (default: that of the configuration, else float32)",
        )
        group.add_argument(
            "--optimizer",
            choices=_OPTIMIZERS,
            help="adamw steps one parameter at a time, adamw-foreach all at once; paged has "
            "weights, gradients and AdamW in host memory (default: adamw)",
        )
        group.add_argument(
            "--lora", type=count, metavar="RANK", help="train LoRA adapters of this rank, like peft"
        )
        group.add_argument(
            "--checkpointing",
            action="store_true",
            default=None,
            help="use activation checkpointing",
        )
        group.add_argument(
            "--generate",
            type=count,
            metavar="N",
            help="predict generating N tokens with a cache (default: a training step)",
        )
        group.add_argument(
            "--ranks",
            action="extend",
            type=_counts,
            metavar="N[,N]",
            help="number of processes, each with a device; several numbers give one row each "
            "(default: 1)",
        )
        group.add_argument(
            "--shard",
            type=_shard,
            metavar="{fsdp2,ddp}",
            help="how ranks share the model (default: fsdp2)",
        )
        group.add_argument(
            "--cpu-offload",
            action="store_true",
            default=None,
            help="keep shards, gradients and optimizer state in host memory (FSDP2)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Predict the step, and compare."""
        options = {
            name: value
            for name, value in vars(arguments).items()
            if name in _OF_MODELS and value is not None
        }
        answered: Any
        is_folder = os.path.isdir(arguments.target)
        if not is_folder and (":" in arguments.target or arguments.target.endswith(".py")):
            answered = self._of_function(arguments, options)
        else:
            answered = self._of_model(arguments, options)
        show(answered, answered.facts, as_json=arguments.json)
        return _DOES_NOT if answered.fits is False else _FITS

    def _of_function(self, arguments: argparse.Namespace, options: dict[str, Any]) -> Any:
        from ._fitting import answer

        if options:
            option = f"--{next(iter(options)).replace('_', '-')}"
            raise CommandError(
                f"{option} is for a MODEL. A FUNCTION makes its batch and its optimizer itself."
            )
        memories = arguments.device_memory or [None]
        if len(memories) > 1:
            raise CommandError("Several sizes of --device-memory are for a MODEL. Name one.")
        return answer(arguments.target, memories[0], arguments.device)

    def _of_model(self, arguments: argparse.Namespace, options: dict[str, Any]) -> Any:
        from ._fitting import free_memory_of
        from ._fleet import Setup, answer

        _refuse_unused(options)
        memories, device = arguments.device_memory, arguments.device or "cuda"
        if memories is None:
            free_bytes, device = free_memory_of(arguments.device)
            memories = [] if free_bytes is None else [free_bytes]
        ranks = options.pop("ranks", [1])
        options["offloads"] = options.pop("cpu_offload", False)
        setup = Setup(arguments.target, **options)
        return answer(setup, ranks, memories, device or "cuda")


_OF_MODELS = frozenset(
    {"batch", "sequence", "images", "dtype", "optimizer", "lora", "checkpointing"}
    | {"generate", "ranks", "shard", "cpu_offload"}
)


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """Refuse what would change nothing: whoever gives it thinks that it does."""
    if "generate" in options and "optimizer" in options:
        raise CommandError("--optimizer is for training. Leave it out, or leave out --generate.")
    if "shard" in options and max(options.get("ranks", [1])) == 1:
        raise CommandError("--shard is for several ranks. Leave it out, or give --ranks above 1.")


def _byte_sizes(text: str) -> list[int]:
    """Read sizes for argparse, as ``24GiB,80GiB``."""
    return [byte_size(each) for each in text.split(",")]


def _counts(text: str) -> list[int]:
    """Read numbers of ranks for argparse, as ``8,64``."""
    # what a process group of torch counts with
    return [whole_number(1, 2**31 - 1)(each) for each in text.split(",")]


def _shard(text: str) -> str:
    """Check a way to share a model for argparse."""
    if text.lower() in _OF_TENSORS:
        raise argparse.ArgumentTypeError(
            "tensor parallelism needs a plan for each layer, which a configuration does not have; "
            "shard the model in a program, and ask predict_peak() in a block of fake_ranks()"
        )
    if text not in _SHARDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; write fsdp2 or ddp")
    return text


def _device_name(text: str) -> str:
    """Check for argparse that torch knows a device of this name, here or not."""
    import torch

    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no device of torch; write cuda, cuda:1, cpu, xpu or mps"
        ) from None
    return text
