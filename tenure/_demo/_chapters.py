"""The story of the demo: its chapters in order, each a function of what it needs.

One to three train in scopes: the model learns, keeps no memory, and names the leak that is planted
in its loop. Four and five have too little memory: for the batch of a step, for a whole model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tenure import DisposedTensorError, DisposeScope, NewDisposeScope
from tenure._text import format_bytes
from tenure.adaptive import AdaptiveEvent, add_listener, memory_budget, remove_listener
from tenure.adaptive import step as split_step
from tenure.paging import page

from ._screen import Screen, silent
from ._subject import (
    MORE_THAN_THERE_IS,
    CharTransformer,
    Corpus,
    Settings,
    draw_windows,
    make_model,
    read_corpus,
)

_ROWS = 10
"""How many losses of the first chapter are shown, after that of its first step."""
_REPORTED_STEPS = 4
_MEASURE = """\
Live bytes after the step: the storages, each counted once, that operations of this run made and
that are still alive: weights, gradients, AdamW's state, and what leaked."""
OpenScope = Callable[[], AbstractContextManager[DisposeScope | None]]
_SHARE_OF_PEAK = 0.6
"""How much of the peak of the plain run the fourth chapter's budget allows."""
_SHARE_OF_WEIGHTS = 0.5
"""How much of the weights the fifth chapter's budget allows at once."""
_PASSES = 3
"""The first pass learns the order, the second is prepared by it, the third is reported."""
Batch = tuple[Tensor, Tensor]


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
    for chapter in (learn, compare_live_bytes, name_the_leak, train_within_a_budget, run_paged):
        chapter(screen, corpus, settings)


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


@dataclass(frozen=True, slots=True)
class Step:
    """What a finished step has to tell.

    Attributes:
        number: counted from 1.
        training_loss: nats per character.
        validation_loss: nats per character, on text that is never trained on.
    """

    number: int
    training_loss: float
    validation_loss: float


def train(
    corpus: Corpus,
    settings: Settings,
    *,
    n_steps: int,
    open_scope: OpenScope,
    on_step: Callable[[Step], None],
) -> list[Tensor]:
    """Train a new model, each step in a block that ``open_scope`` makes.

    Returns:
        The planted leak: every validation loss, float32[], with the graph of its forward pass.
    """
    model = make_model(len(corpus.vocabulary), settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    random = torch.Generator().manual_seed(settings.seed)
    history: list[Tensor] = []

    def validate() -> Tensor:
        n_windows = settings.validation_batch
        return model.loss(*draw_windows(corpus.validation, n_windows, settings.window, random))

    for number in range(1, n_steps + 1):
        with open_scope():
            inputs, following = draw_windows(
                corpus.training, settings.batch, settings.window, random
            )
            loss = model.loss(inputs, following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # the leak: validate().item() was meant
            history.append(validate())
            step = Step(number, loss.item(), history[-1].item())
        on_step(step)
    return history


@dataclass(slots=True)
class _Training:
    """A model, its optimizer and its batches, the same ones for every run."""

    corpus: Corpus
    settings: Settings
    model: CharTransformer = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(len(self.corpus.vocabulary), self.settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate)

    def batches(self) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(self.settings.seed)
        for _ in range(self.settings.compared_steps):
            yield draw_windows(
                self.corpus.training, self.settings.batch, self.settings.window, random
            )

    def loss(self, batch: Batch) -> Tensor:
        return self.model.loss(*batch)

    def run(self, gradients: Callable[[Batch], float]) -> None:
        """Take a step for each batch, with what ``gradients`` leaves in the parameters."""
        for batch in self.batches():
            self.optimizer.zero_grad()
            loss = gradients(batch)
            self.optimizer.step()
            self.losses.append(loss)

    def plain(self, batch: Batch) -> float:
        loss = self.loss(batch)
        loss.backward()
        return loss.item()

    def retried_in_except(self, batch: Batch) -> float:
        try:
            return self.plain(batch)
        except torch.OutOfMemoryError:
            # the exception still holds the frames of the attempt: this is the mistake that is shown
            half = len(batch[0]) // 2
            return self.plain((batch[0][:half], batch[1][:half]))

    def fitted(self, batch: Batch) -> float:
        return split_step(self.loss, batch, model=self.model).loss.item()


def train_within_a_budget(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """See plain steps fail under a budget, and finish there with the losses of the plain run."""
    n_steps = settings.compared_steps
    screen.chapter(f"4. {n_steps} steps in too little memory for their batch of {settings.batch}")
    whole = _Training(corpus, settings)
    with memory_budget(MORE_THAN_THERE_IS) as measured:
        whole.run(whole.plain)
    limit_bytes = int(_SHARE_OF_PEAK * measured.peak_bytes)
    screen.say(
        f"Plain PyTorch needs {format_bytes(measured.peak_bytes)}. From here on there are "
        f"{format_bytes(limit_bytes)}."
    )
    screen.say(f"Plain PyTorch: {_failure(corpus, settings, limit_bytes, _Training.plain)}")
    screen.say(
        "Half the batch, tried again inside `except`: "
        f"{_failure(corpus, settings, limit_bytes, _Training.retried_in_except)}"
    )
    fitted = _Training(corpus, settings)
    with _told(screen), memory_budget(limit_bytes) as budget:
        fitted.run(fitted.fitted)
    screen.say(f"tenure.adaptive.step finishes within {format_bytes(budget.peak_bytes)}:")
    _compare(screen, whole.losses, fitted.losses)


def _failure(
    corpus: Corpus,
    settings: Settings,
    limit_bytes: int,
    gradients: Callable[[_Training, Batch], float],
) -> str:
    training = _Training(corpus, settings)
    try:
        with memory_budget(limit_bytes):
            training.run(lambda batch: gradients(training, batch))
    except torch.OutOfMemoryError as error:
        return f"step {len(training.losses) + 1} fails. {str(error).partition(' in ')[0]}."
    return "finishes."


def _compare(screen: Screen, whole: list[float], fitted: list[float]) -> None:
    screen.heading(["step", "unsplit loss", "split loss"])
    for number, losses in enumerate(zip(whole, fitted, strict=True), 1):
        screen.row([str(number), *(f"{loss:.4f}" for loss in losses)])
    apart = max(abs(one - other) for one, other in zip(whole, fitted, strict=True))
    screen.say(f"The two loss curves differ by {apart:.0e} at the most: rounding.")


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


@torch.inference_mode()
def run_paged(screen: Screen, corpus: Corpus, settings: Settings) -> None:
    """Run a model from a folder within half of its size, and print what the pager tells of it."""
    model = make_model(len(corpus.vocabulary), settings).eval()
    random = torch.Generator().manual_seed(settings.seed)
    windows, following = draw_windows(
        corpus.validation, settings.validation_batch, settings.window, random
    )
    weight_bytes = sum(p.nbytes for p in model.parameters())
    budget_bytes = int(_SHARE_OF_WEIGHTS * weight_bytes)
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
