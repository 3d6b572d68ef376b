"""Real text without a download: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tenure._errors import CommandError

# one part in ten, from the end, is never trained on
_VALIDATION_SHARE = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        n_files: files it was read from.
        vocabulary: its distinct characters in order; a token is an index into it.
        training: int64[n_training], the tokens to learn from.
        validation: int64[n_validation], the tokens that follow.
    """

    n_files: int
    vocabulary: str
    training: Tensor
    validation: Tensor


def read_corpus(n_characters: int) -> Corpus:
    """The first ``n_characters`` of the standard library, its modules in the order of their names.

    Raises:
        CommandError: this Python came without that much source.
    """
    texts = _read_sources(n_characters)
    text = "".join(texts)[:n_characters]
    vocabulary = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([number_of[character] for character in text])
    n_training = len(text) - len(text) // _VALIDATION_SHARE
    return Corpus(len(texts), vocabulary, tokens[:n_training], tokens[n_training:])


def draw_windows(
    tokens: Tensor, n_windows: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Windows from random places of ``tokens``.

    Returns:
        int64[n_windows, length] characters, and int64[n_windows, length] what follows each of them.
    """
    starts = torch.randint(len(tokens) - length, (n_windows, 1), generator=generator)
    places = starts + torch.arange(length)
    return tokens[places], tokens[places + 1]


def _read_sources(n_characters: int) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    missing = n_characters
    for path in sorted(folder.glob("*.py")):
        texts.append(path.read_text(encoding="utf-8"))
        missing -= len(texts[-1])
        if missing <= 0:
            return texts
    raise CommandError(
        f"{folder} holds too little source to learn from ({missing:,} characters short). "
        "Use a Python that comes with the source of its standard library."
    )
