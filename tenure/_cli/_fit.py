"""The verb that says whether work fits on a device, without running it."""

from __future__ import annotations

import argparse

from ._verb import Verb, byte_size, show

_FITS, _DOES_NOT = 0, 1


class Fit(Verb):
    """Say whether work fits into the memory of a device, without running it.

    FUNCTION takes no arguments and returns (fn, batch) or (fn, batch, optimizer): a step is
    fn(batch), the backward pass of what that returns, and a step of the optimizer. It is called on
    tensors without data, so a model of any size takes no memory. The step runs on such tensors too:
    once, and about 20 times more if it does not fit, for a second or two each if the model is
    large. --device says whose memory is meant; this machine need not have the device.

    MODULE is a dotted name, looked for in this directory first, or the path of a .py file.

    Exit code: 0 where it fits, or no memory is known to compare with; 1 where it does not; 2 for a
    mistake, among them any error of FUNCTION and of the step.
    """

    name = "fit"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        parser.add_argument("target", metavar="MODULE:FUNCTION", help="as train.py:setup")
        parser.add_argument(
            "--device-memory",
            type=byte_size,
            metavar="SIZE",
            help="what there is, as 24GiB (default: what is free on the accelerator, if any)",
        )
        parser.add_argument(
            "--device",
            type=_device_name,
            metavar="DEVICE",
            help="whose memory is meant (default: cuda with --device-memory, else the accelerator, "
            "else where the tensors are)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Predict the step, and compare."""
        from ._fitting import answer

        answered = answer(arguments.target, arguments.device_memory, arguments.device)
        show(answered, answered.facts, as_json=arguments.json)
        return _DOES_NOT if answered.fits is False else _FITS


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
