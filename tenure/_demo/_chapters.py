"""The chapters of the demo: each shows the source of what it runs, and what that did."""

from __future__ import annotations

import ast
import inspect
import logging
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from tenure import DisposedTensorError, DisposeScope, NewDisposeScope
from tenure._text import format_bytes
from tenure.adaptive import add_listener, memory_budget, predict_peak, remove_listener

from . import _programs as programs
from ._subject import Batch, Training

_UNLIMITED = "1EiB"
_SHARE_OF_PEAK = 0.6
"""How much of the peak of the plain run the second chapter's budget allows."""
_SHARE_OF_WEIGHTS = 0.7
"""How much of the weights the third chapter's budget allows at once."""


def tell_chapters(*, quick: bool, n_steps: int) -> None:
    """Run the chapters in order."""

    def begin() -> Training:
        return Training(quick=quick)

    # it prints itself what these would log
    logging.disable(logging.WARNING)
    n_weights = sum(parameter.numel() for parameter in begin().model.parameters())
    _say(
        f"The work: a network of {n_weights:,} weights learns to read PyTorch's own source. "
        f"CPU, torch {torch.__version__}. All chapters take about a minute."
    )
    print("\nChapter 1 of 4: a loop that leaks\n")
    leak(begin, n_steps)
    print("\nChapter 2 of 4: the batch is too large\n")
    fit_the_batch(begin, n_steps)
    print("\nChapter 3 of 4: the model is too large\n")
    page_the_model(begin)
    print("\nChapter 4 of 4: your own program\n")
    record_a_program()


def leak(begin: Callable[[], Training], n_steps: int) -> None:
    """Run the same steps without and with scopes, and then under a scope that reports."""
    _show_code(programs.train)
    losses: dict[str, list[float]] = {"without scopes": [], "with scopes": []}
    levels: dict[str, list[int]] = {"without scopes": [], "with scopes": []}
    history: list[torch.Tensor] = []
    for name in losses:
        open_scope = nullcontext if name == "without scopes" else partial(NewDisposeScope, "step")
        with memory_budget(_UNLIMITED) as live:

            def note(loss: float, name: str = name, live: memory_budget = live) -> None:
                losses[name].append(loss)
                levels[name].append(live.live_bytes)

            history = programs.train(begin(), n_steps, open_scope, note)
    _say(
        'It runs twice: with an `open_scope` that does nothing, and with NewDisposeScope("step"). '
        "Bytes alive after each step:"
    )
    print("  step    without scopes       with scopes")
    for number, (plain_bytes, scoped_bytes) in enumerate(zip(*levels.values(), strict=True), 1):
        print(f"{number:>6}{format_bytes(plain_bytes):>18}{format_bytes(scoped_bytes):>18}")
    plain, scoped = losses.values()
    _say(
        f"The losses of the two runs are {'' if plain == scoped else 'NOT '}the same to the last "
        f"bit ({plain[0]:.3f} at first, {plain[-1]:.3f} at the end). A handle that is still used "
        "says what happened:"
    )
    try:
        history[-1].item()
    except DisposedTensorError as error:
        _say(f"  {error}")
    _say('Who holds it? With NewDisposeScope("step", policy="report") nothing is disposed, and:')
    scopes: list[DisposeScope] = []

    def open_reporting() -> DisposeScope:
        scopes.append(NewDisposeScope("step", policy="report"))
        return scopes[-1]

    programs.train(begin(), 4, open_reporting, lambda loss: None)
    print(scopes[-1].leaks)
    _say("The cure: history.append(run.validate().item())")


def fit_the_batch(begin: Callable[[], Training], n_steps: int) -> None:
    """See plain steps fail under a budget, and finish there with the losses of the plain run."""
    run = begin()
    batches = list(begin().batches(n_steps))
    predicted = predict_peak(run.loss, batches[0], optimizer=run.optimizer)
    with memory_budget(_UNLIMITED) as measured:
        expected = _losses(run, programs.train_plain, batches)
    limit_bytes = int(_SHARE_OF_PEAK * measured.peak_bytes)
    _say(
        "Predicted for a step beside weights and batch: "
        f"{format_bytes(predicted.needed_bytes - predicted.baseline_bytes)}. Measured: "
        f"{format_bytes(measured.peak_bytes)}. From here on there are {format_bytes(limit_bytes)}."
    )
    for program in (programs.train_plain, programs.train_with_retry):
        print()
        _show_code(program)
        try:
            with memory_budget(limit_bytes):
                _losses(begin(), program, batches)
            _say("It finishes.")
        except torch.OutOfMemoryError as error:
            _say(f"It fails: {str(error).partition(' in ')[0]}.")
    _say(
        "The error that is handled there holds the frames of the attempt, and with them all that "
        "it made. With tenure:"
    )
    print()
    _show_code(programs.train_fitted)

    def tell(event: object) -> None:
        _say(f"  {event}")

    add_listener(tell)
    try:
        with memory_budget(limit_bytes) as budget:
            found = _losses(begin(), programs.train_fitted, batches)
    finally:
        remove_listener(tell)
    apart = max(abs(one - other) for one, other in zip(expected, found, strict=True))
    _say(
        f"{n_steps} steps within {format_bytes(budget.peak_bytes)}. The last loss is "
        f"{found[-1]:.4f}, and {expected[-1]:.4f} all at once; they differ by {apart:.0g} at most."
    )


def _losses(
    run: Training, gradients: Callable[[Training, Batch], float], batches: list[Batch]
) -> list[float]:
    """Take steps, with the gradients that a function leaves in the parameters."""
    losses = []
    for batch in batches:
        run.optimizer.zero_grad()
        losses.append(gradients(run, batch))
        run.optimizer.step()
    return losses


@torch.no_grad()
def page_the_model(begin: Callable[[], Training]) -> None:
    """Run a network from a folder, in less memory than its weights need."""
    run = begin()
    (batch,) = run.batches(1)
    weight_bytes = sum(parameter.nbytes for parameter in run.model.parameters())
    budget_bytes = int(_SHARE_OF_WEIGHTS * weight_bytes)
    _say(
        f"The weights take {format_bytes(weight_bytes)}; there are {format_bytes(budget_bytes)} "
        "for them, and a folder."
    )
    print()
    _show_code(programs.run_paged)
    whole = run.loss(batch)
    with tempfile.TemporaryDirectory() as folder:
        losses, plan, report = programs.run_paged(run, batch, budget_bytes, Path(folder))
    print(plan)
    same = "" if all(map(whole.equal, losses)) else "NOT "
    _say(
        f"Measured: {format_bytes(report.resident_bytes)} stay, {format_bytes(report.ring_bytes)} "
        f"are room for the others, {format_bytes(report.bytes_per_pass)} were read in each pass. "
        f"The loss is {same}the same as with all weights in memory, to the last bit."
    )


def record_a_program() -> None:
    """Record a program that knows nothing of tenure, and say where the files are."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-demo-"))
    folder.joinpath("train.py").write_text(programs.LEAK, "utf-8")
    _say("This one knows nothing of tenure:")
    print(f"\n{textwrap.indent(programs.LEAK, '    ')}")
    for command in (
        "tenure run --leaks --timeline train.py",
        "tenure export train.tenure -o train.html",
    ):
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        _say(done.stdout)
    print(f"\nThe files are yours to look at:\n  cd {folder}")
    print("  tenure report train.tenure      on this terminal; also tree, leaks, diff")
    print("  xdg-open train.html             in a browser; on macOS open, on Windows start")
    print("\nAnd then: tenure run YOUR_SCRIPT.py")


def _say(text: str) -> None:
    """Print text in lines of 80 columns; each keeps its indentation."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        print(textwrap.fill(line.strip(), 80, initial_indent=indent, subsequent_indent=indent))


def _show_code(function: Callable[..., object]) -> None:
    print(textwrap.indent(body_of(function).strip("\n"), "    "), end="\n\n")


def body_of(function: Callable[..., object]) -> str:
    """Return the source of a function without its head and its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    return textwrap.dedent("\n".join(source.splitlines()[definition.body[1].lineno - 1 :]))
