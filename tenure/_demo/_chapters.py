"""The story of the demo: its chapters in order, each a function of the screen and the work.

One and two plant a leak and name it; three to five have too little memory, for the batch of a step,
for a whole model, and for both; the last one is about the reader's own program. Each shows the
source of what it runs, and what is forecast stands beside what was measured of the same thing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from tenure import DisposedTensorError, DisposeScope, NewDisposeScope
from tenure._text import format_bytes
from tenure.adaptive import (
    AdaptiveEvent,
    add_listener,
    memory_budget,
    predict_peak,
    remove_listener,
)

from . import _programs as programs
from ._beyond import tell_beyond_memory
from ._processes import output_of
from ._programs import Batch, OpenScope, Training
from ._screen import Screen, body_of, silent
from ._settings import Settings
from ._subject import Corpus, read_corpus

_MORE_THAN_THERE_IS = "1EiB"
"""A budget that measures and never refuses."""
_REPORTED_STEPS = 4
_SHARE_OF_PEAK = 0.6
"""How much of the peak of the plain run the third chapter's budget allows."""
_SHARE_OF_WEIGHTS = 0.5
"""How much of the weights the fourth chapter's budget allows at once."""
_DIFFERENCE = 1e-5
"""What rounding may make of two losses that are the same."""


@dataclass(frozen=True, slots=True)
class _Chapter:
    """A chapter, with its share of the time that all of them take."""

    title: str
    share: float
    tell: Callable[[Screen, Corpus, Settings], None]


def tell_chapters(screen: Screen, settings: Settings) -> None:
    """Read the text, then run the chapters.

    Raises:
        CommandError: this Python came without the source of its standard library.
    """
    began_s = monotonic()
    corpus = read_corpus(settings.characters)
    screen.say(
        f"The work: a transformer of {settings.layers} layers and {settings.width} features learns "
        f"from {settings.characters:,} characters of Python's own standard library. "
        f"CPU, torch {torch.__version__}, seed {settings.seed}."
    )
    done = 0.0
    for number, chapter in enumerate(_CHAPTERS, 1):
        taken_s = monotonic() - began_s
        left_s = taken_s * (1 - done) / done if done else settings.expected_s
        screen.chapter(
            f"Chapter {number} of {len(_CHAPTERS)}: {chapter.title} (about {left_s:.0f} s left)"
        )
        chapter.tell(screen, corpus, settings)
        done += chapter.share


@dataclass(slots=True)
class _Run:
    """What a run left behind.

    Attributes:
        losses: the training loss of each step.
        live_bytes: what was alive after each step.
        history: the planted leak.
    """

    losses: list[float] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    history: list[Tensor] = field(default_factory=list)


def leak(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run the same steps twice, and print the live bytes after each side by side."""
    screen.code(body_of(programs.train))
    screen.say(
        'It runs twice: with an `open_scope` that does nothing, and with NewDisposeScope("step"). '
        "Bytes alive after the step, each storage counted once: weights, gradients, AdamW's state, "
        "and what leaked."
    )
    plain = _measured(corpus, settings, nullcontext)
    scoped = _measured(corpus, settings, partial(NewDisposeScope, "step"))
    screen.heading(["step", "without scopes", "with scopes"])
    for number, live in enumerate(zip(plain.live_bytes, scoped.live_bytes, strict=True), 1):
        screen.row([str(number), *map(format_bytes, live)])
    same = "the same" if plain.losses == scoped.losses else "NOT the same"
    screen.say(
        f"The losses of the two runs are {same} to the last bit "
        f"({scoped.losses[0]:.3f} at first, {scoped.losses[-1]:.3f} at the end). "
        "The list still has its handles; one that is used says what happened:"
    )
    screen.say(f"  {_refusal(scoped.history)}")


def _measured(corpus: Corpus, settings: Settings, open_scope: OpenScope) -> _Run:
    run = _Run()
    with memory_budget(_MORE_THAN_THERE_IS) as live:

        def after_step(loss: float) -> None:
            run.losses.append(loss)
            run.live_bytes.append(live.live_bytes)

        run.history = programs.train(
            Training(corpus, settings), settings.steps, open_scope, after_step
        )
    return run


def _refusal(history: list[Tensor]) -> str:
    try:
        return f"{history[-1].item()}"
    except DisposedTensorError as error:
        return f"{type(error).__name__}: {error}"


def name_the_leak(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a few steps under ``policy="report"``, and print the report of the last one."""
    screen.say(
        f"{_REPORTED_STEPS} steps of the same loop, with this `open_scope`. Nothing is let go, so "
        "nothing of the program changes."
    )
    screen.show("")
    screen.code(body_of(programs.open_reporting))
    scopes: list[DisposeScope] = []
    # what it logs is printed below
    with silent("tenure.scopes"):
        programs.train(
            Training(corpus, settings),
            _REPORTED_STEPS,
            partial(programs.open_reporting, scopes),
            lambda loss: None,
        )
    # also where it is empty: a report that is missing would look like a loop without a leak
    screen.show(str(scopes[-1].leaks))
    screen.say("The cure: history.append(run.validate().item())")


def fit_the_batch(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """See plain steps fail under a budget, and finish there with the losses of the plain run."""
    whole = Training(corpus, settings)
    (batch,) = Training(corpus, settings).batches(1)
    there_bytes = sum(tensor.nbytes for tensor in (*whole.model.parameters(), *batch))
    predicted = predict_peak(whole.loss, batch, optimizer=whole.optimizer)
    predicted_bytes = predicted.needed_bytes - predicted.baseline_bytes
    with memory_budget(_MORE_THAN_THERE_IS) as measured:
        expected = _losses(whole, programs.train_plain)
    limit_bytes = int(_SHARE_OF_PEAK * measured.peak_bytes)
    screen.say(
        f"Forecast for a step, before it ran: {format_bytes(predicted_bytes)} beside the "
        f"{format_bytes(there_bytes)} of weights and batch. Measured: "
        f"{format_bytes(measured.peak_bytes)}. From here on there are {format_bytes(limit_bytes)}."
    )
    screen.show("")
    screen.code(body_of(programs.train_plain))
    screen.say(_failure(corpus, settings, limit_bytes, programs.train_plain))
    screen.say("So one tries again with half of the batch:")
    screen.show("")
    screen.code(body_of(programs.train_with_retry))
    screen.say(_failure(corpus, settings, limit_bytes, programs.train_with_retry))
    screen.say(
        "The error that is handled there holds the frames of the attempt, and with them all that "
        "it made. What tenure does instead:"
    )
    screen.show("")
    screen.code(body_of(programs.train_fitted))
    fitted = Training(corpus, settings)
    with _told(screen), memory_budget(limit_bytes) as budget:
        found = _losses(fitted, programs.train_fitted)
    screen.say(
        f"{settings.steps} steps within {format_bytes(budget.peak_bytes)}, and the losses of the "
        "large machine:"
    )
    screen.heading(["step", "all at once", "in micro-batches"])
    for number, losses in enumerate(zip(expected, found, strict=True), 1):
        screen.row([str(number), *(f"{loss:.4f}" for loss in losses)])
    apart = max(abs(one - other) for one, other in zip(expected, found, strict=True))
    verdict = "rounding" if apart < _DIFFERENCE else "MORE than rounding"
    screen.say(f"They differ by {apart:.0e} at the most: {verdict}.")


def _losses(run: Training, gradients: Callable[[Training, Batch], float]) -> list[float]:
    """Take the steps, with what ``gradients`` leaves in the parameters."""
    losses = []
    for batch in run.batches(run.settings.steps):
        run.optimizer.zero_grad()
        losses.append(gradients(run, batch))
        run.optimizer.step()
    return losses


def _failure(
    corpus: Corpus,
    settings: Settings,
    limit_bytes: int,
    gradients: Callable[[Training, Batch], float],
) -> str:
    try:
        with memory_budget(limit_bytes):
            _losses(Training(corpus, settings), gradients)
    except torch.OutOfMemoryError as error:
        return f"It fails: {str(error).partition(' in ')[0]}."
    return "It finishes."


@contextmanager
def _told(screen: Screen) -> Iterator[None]:
    """Print what a retry decides."""

    def say(event: AdaptiveEvent) -> None:
        screen.say(f"  {event}")

    add_listener(say)
    try:
        # it logs the same
        with silent("tenure.adaptive"):
            yield
    finally:
        remove_listener(say)


@torch.no_grad()
def page_the_model(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a model from a folder within half of its size, and compare what was planned."""
    run = Training(corpus, settings)
    model = run.model.eval()
    (batch,) = run.batches(1)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    budget_bytes = int(_SHARE_OF_WEIGHTS * weight_bytes)
    screen.say(
        f"The weights take {format_bytes(weight_bytes)}; there are {format_bytes(budget_bytes)} "
        "for them, and a folder."
    )
    screen.show("")
    screen.code(body_of(programs.run_paged))
    whole = model.loss(*batch)
    with tempfile.TemporaryDirectory() as folder:
        losses, plan, report = programs.run_paged(model, batch, budget_bytes, Path(folder))
    passing = sum(unit.n_bytes for unit in plan.units if not unit.resident)
    screen.show(f"{'':24}{'planned':>10}{'measured':>14}")
    for what, planned, measured in (
        ("stays in memory", plan.resident_bytes, report.resident_bytes),
        ("room to pass through", plan.ring_bytes, report.ring_bytes),
        ("read in each pass", passing, report.bytes_per_pass),
    ):
        screen.show(f"  {what:<22}{format_bytes(planned):>10}{format_bytes(measured):>14}")
    screen.say(
        f"A pass took {report.pass_s * 1e3:.1f} ms, of which {report.stall_s * 1e3:.1f} ms waited "
        "for weights; the rest was computing."
    )
    same = "the same" if all(map(whole.equal, losses)) else "NOT the same"
    screen.say(f"The loss is {same} as with all weights in memory, to the last bit.")


def fit_both(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Train with gradients of the whole where neither the model nor its batch fits."""
    del corpus
    screen.code(body_of(programs.train_paged))
    screen.show(tell_beyond_memory(settings).rstrip("\n"))


def record_a_program(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Record a program that knows nothing of tenure, and say where the files are."""
    del corpus, settings
    source = Path(__file__).with_name("_leak.py").read_text("utf-8").partition("import torch")
    folder = Path(tempfile.mkdtemp(prefix="tenure-demo-"))
    folder.joinpath("train.py").write_text("".join(source[1:]), "utf-8")
    screen.say("This one knows nothing of tenure:")
    screen.show("")
    screen.code("".join(source[1:]))
    for command in (
        "tenure run --leaks --timeline train.py",
        "tenure export train.tenure -o train.html",
    ):
        screen.show(f"$ {command}")
        screen.say(output_of(*command.split(), folder=folder))
    screen.show("")
    screen.say("The files are yours to look at:")
    screen.show(f"  cd {folder}")
    screen.show("  tenure report train.tenure      on this terminal; also tree, leaks, diff")
    screen.show("  xdg-open train.html             in a browser; on macOS open, on Windows start")
    screen.show("")
    screen.say("And then: tenure run YOUR_SCRIPT.py")


_CHAPTERS = (
    _Chapter("a loop that leaks, and the same in scopes", 0.27, leak),
    _Chapter("who holds it?", 0.02, name_the_leak),
    _Chapter("the batch is too large", 0.06, fit_the_batch),
    _Chapter("the model is too large", 0.02, page_the_model),
    _Chapter("model and batch are too large", 0.28, fit_both),
    _Chapter("your own program", 0.35, record_a_program),
)
