"""The second chapter: the same steps without scopes and with them, and what each leaves alive."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from tenure import DisposedTensorError, NewDisposeScope
from tenure._text import format_bytes
from tenure.adaptive import memory_budget

from ._screen import Screen
from ._settings import Settings
from ._text import Corpus
from ._training import OpenScope, Step, train

_MORE_THAN_THERE_IS = "1EiB"
_MEASURE = """\
Live bytes after the step: the storages, each counted once, that operations of this run made and
that are still alive: weights, gradients, AdamW's state, and what leaked."""


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
    with memory_budget(_MORE_THAN_THERE_IS) as live:

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
