"""The first chapter: a training loop in scopes learns like any other."""

from __future__ import annotations

from functools import partial

from tenure import NewDisposeScope

from ._screen import Screen
from ._settings import Settings
from ._text import Corpus
from ._training import Step, train

_ROWS = 10


def learn(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Train with a scope around each step, and print the loss as it goes down."""
    screen.chapter(f"1. {settings.steps} training steps, each in a scope")
    screen.heading(["step", "training loss", "validation loss"])
    shown = _shown_steps(settings.steps)

    with screen.progress("training", settings.steps) as advance:

        def on_step(step: Step) -> None:
            advance()
            if step.number in shown:
                losses = f"{step.training_loss:.3f}", f"{step.validation_loss:.3f}"
                screen.row([str(step.number), *losses])

        train(
            corpus,
            settings,
            n_steps=settings.steps,
            open_scope=partial(NewDisposeScope, "step"),
            on_step=on_step,
        )
    screen.say("Losses are in nats per character, of one batch each.")


def _shown_steps(n_steps: int) -> set[int]:
    return {1, *(max(1, n_steps * row // _ROWS) for row in range(1, _ROWS + 1))}
