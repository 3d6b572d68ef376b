"""The verb that says whether work fits on a device, without running it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ._run import check_target
from ._verb import Verb, byte_size, show, write_file

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
        parser.add_argument("--html", metavar="FILE", help="write a page of HTML, too")
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="write to FILE what else is printed"
        )
        parser.add_argument("-f", "--force", action="store_true", help="overwrite FILE")

    def run(self, arguments: argparse.Namespace) -> int:
        """Predict the step, and compare."""
        # it may take minutes, which are not to be lost on a name
        for path in filter(None, (arguments.html, arguments.output)):
            check_target(Path(path), replace=arguments.force, may_be_device=True)
        _begin("load torch")
        from tenure._show import page

        from ._fitting import answer

        answered = answer(arguments.target, arguments.device_memory, arguments.device, _begin)
        if arguments.html:
            title = f"tenure fit {arguments.target}"
            write_file(arguments.html, page(title, answered._repr_html_()))
        facts = answered.facts() if arguments.json else None
        if arguments.output:
            write_file(arguments.output, f"{json.dumps(facts, indent=2) if facts else answered}\n")
        else:
            show(answered, facts, as_json=arguments.json)
        return _DOES_NOT if answered.fits is False else _FITS


def _begin(part: str) -> None:
    """Say what begins now, on a terminal: one prediction may take minutes."""
    if os.environ.get("TENURE_PROGRESS") != "0" and sys.stderr and sys.stderr.isatty():
        print(f"tenure fit: {part}", file=sys.stderr)


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
