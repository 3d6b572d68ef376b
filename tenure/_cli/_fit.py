"""The verb that says whether work fits on a device, without running it."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tenure._errors import CommandError

from ._verb import Verb, add_options, byte_size, show, whole_number

_FITS, _DOES_NOT = 0, 1
_OF_MODELS = """
--batch N               samples on each rank (default: 1)
--sequence N            tokens of a sample (default: the longest the model is made for, at most
                        2048)
--images N              images in the text of a sample, for models that take both (default: 1; of
                        448 x 448 pixels if the model takes images of any size)
--dtype {float32|bfloat16|float16|float64}
                        dtype of the weights (default: that of the configuration, else float32)
--optimizer {adamw|adamw-foreach|sgd|adafactor|paged|none}
                        adamw steps one parameter at a time, adamw-foreach all at once; paged has
                        weights, gradients and AdamW in host memory (default: adamw)
--lora RANK             train LoRA adapters of this rank, like peft
--checkpointing         use activation checkpointing
--generate N            predict generating N tokens with a cache (default: a training step)
--ranks N[,N]           number of processes, each with a device; several numbers give one row each
                        (default: 1)
--shard {fsdp2|ddp}     how ranks share the model (default: fsdp2); for tensor parallelism, ask
                        predict_peak() in a block of fake_ranks()
--cpu-offload           keep shards, gradients and optimizer state in host memory (FSDP2)
"""


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
    options = """
target MODEL|MODULE:FUNCTION  such as ./Llama-3-8B, or train.py:setup
--device-memory SIZE[,SIZE]   memory of the device, such as 24GiB (default: free memory of the
                              accelerator, if there is one)
--device DEVICE               the type of device (default: cuda for a MODEL and with
                              --device-memory, else the accelerator, else the device of the tensors)
--json                        print JSON
"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        sizes = {"action": "extend", "type": _list_of(byte_size)}
        kinds = {"--device-memory": sizes, "--device": {"type": _device_name}}
        add_options(parser, cls.options, kinds)
        kinds = {
            "--images": {"type": whole_number(0)},
            "--lora": {"type": whole_number(1)},
            # what a process group of torch counts with
            "--ranks": {"action": "extend", "type": _list_of(whole_number(1, 2**31 - 1))},
        }
        add_options(parser.add_argument_group("for a MODEL"), _OF_MODELS, kinds)

    def run(self, arguments: argparse.Namespace) -> int:
        """Predict the step, and compare."""
        options = {
            name: value
            for name, value in vars(arguments).items()
            if f"--{name.replace('_', '-')} " in _OF_MODELS
            and value is not None
            and value is not False
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

        ranks, offloads = options.pop("ranks", [1]), options.pop("cpu_offload", False)
        _refuse_what_changes_nothing(options, ranks, offloads)
        memories, device = arguments.device_memory, arguments.device or "cuda"
        if memories is None:
            free_bytes, device = free_memory_of(arguments.device)
            memories = [] if free_bytes is None else [free_bytes]
        setup = Setup(arguments.target, **options, offloads=offloads)
        return answer(setup, ranks, memories, device or "cuda")


def _refuse_what_changes_nothing(options: dict[str, Any], ranks: list[int], offloads: bool) -> None:
    """Refuse an option that would change nothing: whoever gives it thinks that it does."""
    shard, generates = options.get("shard", "fsdp2"), "generate" in options
    trains = (each for each in ("optimizer", "lora", "checkpointing") if each in options)
    of_training = next(trains, "") if generates else ""
    for is_wrong, told in (
        (
            of_training,
            f"--{of_training} is for training. Leave it out, or leave out --generate.",
        ),
        (
            "shard" in options and max(ranks) == 1,
            "--shard is for several ranks. Leave it out, or give --ranks above 1.",
        ),
        (
            options.get("optimizer") == "paged" and max(ranks) > 1,
            "--optimizer paged is for one device. Leave out --ranks, or take --optimizer adamw.",
        ),
        (
            offloads and (min(ranks) == 1 or shard != "fsdp2"),
            "--cpu-offload is for shards: give --ranks above 1, and --shard fsdp2. On one "
            "device --optimizer paged has weights, gradients and AdamW in host memory.",
        ),
        (
            generates and max(ranks) > 1 and shard == "ddp",
            "DDP exchanges gradients, and generating makes none: each rank takes what one "
            "takes. Leave out --ranks, or shard the weights with --shard fsdp2.",
        ),
    ):
        if is_wrong:
            raise CommandError(told)


def _list_of(read: Any) -> Any:
    """Return a ``type`` for argparse that reads several values, as ``24GiB,80GiB``."""
    return lambda text: [read(each) for each in text.split(",")]


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
