"""The story of the demo: its chapters in order, each a function of what it needs."""

from __future__ import annotations

import torch

from ._corpus import read_corpus
from ._scoped import compare_live_bytes, learn, name_the_leak
from ._screen import Screen
from ._settings import Settings
from ._shortage import run_paged, train_within_a_budget

_CHAPTERS = (learn, compare_live_bytes, name_the_leak, train_within_a_budget, run_paged)


def tell(settings: Settings) -> None:
    """Read the text, then run the chapters.

    Raises:
        CommandError: this Python came without the source of its standard library.
    """
    screen = Screen()
    corpus = read_corpus(settings.characters)
    screen.say(
        f"Text: {settings.characters:,} characters of Python's standard library "
        f"({corpus.n_files} files, {len(corpus.vocabulary)} distinct characters), the last tenth "
        "held out.\n"
        f"Model: a transformer of {settings.layers} layers and {settings.width} features that sees "
        f"{settings.window} characters; torch {torch.__version__}, seed {settings.seed}."
    )
    for chapter in _CHAPTERS:
        chapter(screen, corpus, settings)
