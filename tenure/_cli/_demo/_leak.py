"""The third chapter: the same loop again, in scopes that let nothing go and say who holds what."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tenure import DisposeScope, LeakRecord, LeakReport, NewDisposeScope

from ._screen import Screen
from ._settings import Settings
from ._text import Corpus
from ._training import train

_STEPS = 4
_IN_GRAPH = " in the graph of "  # so read the holders of what autograd saved


def name_the_leak(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a few steps under ``policy="report"``, and print the report of the last one."""
    screen.chapter(f'3. {_STEPS} steps with policy="report": who holds what outlives the last one?')
    scopes: list[DisposeScope] = []

    def open_scope() -> DisposeScope:
        scopes.append(NewDisposeScope(f"step {len(scopes) + 1}", policy="report"))
        return scopes[-1]

    with _quiet_log():
        train(corpus, settings, n_steps=_STEPS, open_scope=open_scope, on_step=lambda step: None)
    if leaks := scopes[-1].leaks:
        _print_report(screen, leaks)
    screen.say("The cure: history.append(validate().item())")


def _print_report(screen: Screen, leaks: LeakReport) -> None:
    """The report without the graph's own tensors, of which only the largest is shown."""
    screen.say(f"{leaks.summary()}:")
    saved = [record for record in leaks.records if _IN_GRAPH in record.holders[0]]
    for record in leaks.records:
        if record not in saved:
            _print_record(screen, record)
    screen.say(f"  and {len(saved)} tensors that autograd saved with it, the largest of them:")
    _print_record(screen, max(saved, key=lambda record: (record.nbytes, record.holders)))


def _print_record(screen: Screen, record: LeakRecord) -> None:
    screen.say(f"  {record}, created at {record.created_at}")
    screen.say(f"    held by {record.holders[0]}")


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Reports are logged too; here they are printed instead."""
    logger = logging.getLogger("tenure.scopes")
    silent = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = propagate
