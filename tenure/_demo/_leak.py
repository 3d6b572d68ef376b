"""The third chapter: the same loop again, in scopes that let nothing go and say who holds what."""

from __future__ import annotations

from tenure import DisposeScope, NewDisposeScope

from ._log import silent
from ._screen import Screen
from ._settings import Settings
from ._text import Corpus
from ._training import train

_STEPS = 4


def name_the_leak(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a few steps under ``policy="report"``, and print the report of the last one."""
    screen.chapter(f'3. {_STEPS} steps with policy="report": who holds what outlives the last one?')
    scopes: list[DisposeScope] = []

    def open_scope() -> DisposeScope:
        scopes.append(NewDisposeScope(f"step {len(scopes) + 1}", policy="report"))
        return scopes[-1]

    with silent("tenure.scopes"):  # what it logs is printed below
        train(corpus, settings, n_steps=_STEPS, open_scope=open_scope, on_step=lambda step: None)
    # also where it is empty: a report that is missing would look like a loop without a leak
    screen.say(str(scopes[-1].leaks))
    screen.say("The cure: history.append(validate().item())")
