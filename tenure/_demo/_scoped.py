"""Chapters one to three, training in scopes: it learns, it keeps no memory, it names its leak."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from tenure import DisposedTensorError, DisposeScope, NewDisposeScope
from tenure._text import format_bytes
from tenure.adaptive import memory_budget

from ._corpus import Corpus
from ._screen import Screen, silent
from ._settings import MORE_THAN_THERE_IS, Settings
from ._training import OpenScope, Step, train

_ROWS = 10
"""How many losses of the first chapter are shown, after that of its first step."""
_REPORTED_STEPS = 4
_MEASURE = """\
Live bytes after the step: the storages, each counted once, that operations of this run made and
that are still alive: weights, gradients, AdamW's state, and what leaked."""


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


@dataclass(slots=True)
class _Run:
    """What a run left behind.

    Attributes:
        steps: what each step told.
        live_bytes: what was alive after each step.
        history: the planted leak.
    """

    steps: list[Step] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    history: list[Tensor] = field(default_factory=list)


def compare_live_bytes(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run the same steps twice, and print the live bytes after each side by side."""
    screen.chapter(f"2. The same {settings.compared_steps} steps, without scopes and with them")
    plain = _measured(corpus, settings, nullcontext)
    scoped = _measured(corpus, settings, partial(NewDisposeScope, "step"))
    screen.heading(["step", "without scopes", "with scopes"])
    for step, *live in zip(plain.steps, plain.live_bytes, scoped.live_bytes, strict=True):
        screen.row([str(step.number), *map(format_bytes, live)])
    screen.say(_MEASURE)
    same = "the same" if plain.steps == scoped.steps else "NOT the same"
    screen.say(f"The losses of the two runs are {same} to the last bit.")
    screen.say(f"Reading what the scope let go: {_refusal(scoped.history)}")


def _measured(corpus: Corpus, settings: Settings, open_scope: OpenScope) -> _Run:
    run = _Run()
    with memory_budget(MORE_THAN_THERE_IS) as live:

        def on_step(step: Step) -> None:
            run.steps.append(step)
            run.live_bytes.append(live.live_bytes)

        run.history = train(
            corpus,
            settings,
            n_steps=settings.compared_steps,
            open_scope=open_scope,
            on_step=on_step,
        )
    return run


def _refusal(history: list[Tensor]) -> str:
    try:
        return f"{history[-1].item()}"
    except DisposedTensorError as error:
        return f"{type(error).__name__}: {error}"


def name_the_leak(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a few steps under ``policy="report"``, and print the report of the last one."""
    screen.chapter(
        f'3. {_REPORTED_STEPS} steps with policy="report": who holds what outlives the last one?'
    )
    scopes: list[DisposeScope] = []

    def open_scope() -> DisposeScope:
        scopes.append(NewDisposeScope(f"step {len(scopes) + 1}", policy="report"))
        return scopes[-1]

    # what it logs is printed below
    with silent("tenure.scopes"):
        train(
            corpus,
            settings,
            n_steps=_REPORTED_STEPS,
            open_scope=open_scope,
            on_step=lambda step: None,
        )
    # also where it is empty: a report that is missing would look like a loop without a leak
    screen.say(str(scopes[-1].leaks))
    screen.say("The cure: history.append(validate().item())")
