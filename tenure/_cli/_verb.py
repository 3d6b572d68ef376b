"""What every verb has: a name, its help, arguments, and what it does."""

from __future__ import annotations

import argparse
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from tenure._byte_sizes import parse_bytes
from tenure._errors import ByteSizeError

_FEWEST_BYTES = 2**20
"""A bare number below it was meant in a unit: no device has so little."""


class Verb(ABC):
    """A verb of the command line; the docstring of its class is its help."""

    name: ClassVar[str]

    @classmethod
    def help(cls) -> str:
        """Its help, of which the first line stands in the list of verbs."""
        return inspect.getdoc(cls) or ""

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int | Callable[[], int]:
        """Do it.

        Returns:
            The exit code; or what is still to be done and gives it, whose errors are not the
            command's but go on as they are.

        Raises:
            CommandError: the user has to change something.
        """


def whole_number(minimum: int, maximum: int = 2**64 - 1) -> Callable[[str], int]:
    """A ``type`` for argparse: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {minimum}")
        if int(text) > maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is above {maximum}")
        return int(text)

    return parse


def byte_size(text: str) -> int:
    """A ``type`` for argparse: a number of bytes, as ``24GiB``."""
    try:
        n_bytes = parse_bytes(text)
    except ByteSizeError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    if n_bytes < _FEWEST_BYTES and text.strip().isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is {n_bytes} bytes; write the unit, such as {text.strip()}GiB, or "
            f"{text.strip()}B if it is meant"
        )
    return n_bytes


def device_name(text: str) -> str:
    """A ``type`` for argparse: a device as torch names it, here or not."""
    import torch

    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no device of torch; write cuda, cuda:1, cpu, xpu or mps"
        ) from None
    return text
