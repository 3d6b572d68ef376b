"""The fifth chapter: a transformer that is larger than the memory it may take."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tenure._text import format_bytes
from tenure.paging import page

from ._model import make_model
from ._screen import Screen
from ._settings import Settings
from ._text import Corpus, draw_windows

_SHARE = 0.5
"""How much of the weights the budget allows at once."""
_PASSES = 3
"""The first pass learns the order, the second is prepared by it, the third is reported."""


@torch.inference_mode()
def run_paged(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a model from a folder within half of its size, and print what the pager tells of it."""
    model = make_model(len(corpus.vocabulary), settings).eval()
    random = torch.Generator().manual_seed(settings.seed)
    windows, following = draw_windows(
        corpus.validation, settings.validation_batch, settings.window, random
    )
    weight_bytes = sum(p.nbytes for p in model.parameters())
    budget_bytes = int(_SHARE * weight_bytes)
    screen.chapter(
        f"5. {format_bytes(weight_bytes)} of weights in {format_bytes(budget_bytes)} of memory"
    )
    whole = model.loss(windows, following)
    with (
        tempfile.TemporaryDirectory() as folder,
        page(model, "cpu", budget=budget_bytes, host=Path(folder)) as handle,
    ):
        screen.say(str(handle.plan).partition("\n    ")[0])
        screen.say(
            "The plan times the copies alone, at an assumed speed; the next lines are measured."
        )
        paged = [model.loss(windows, following) for _ in range(_PASSES)]
        screen.say(str(handle.report()))
    same = "the same" if all(map(whole.equal, paged)) else "NOT the same"
    screen.say(f"The loss of the paged model is {same} to the last bit.")
