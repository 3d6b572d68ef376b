"""Work that ``tenure fit`` is asked about: made without data, predicted, cut into micro-batches."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenure import _devices
from tenure._callers import package_of
from tenure._containers import tensors_in
from tenure._errors import CommandError, TenureError
from tenure._show import Paragraph, Part, Shown, plain
from tenure._text import counted, format_bytes
from tenure._without_data import without_data
from tenure.adaptive import (
    AdaptiveUsageError,
    Advice,
    BatchCoupledError,
    OutOfRetriesError,
    PeakReport,
    plan,
    predict_peak,
)


class MicroBatch(NamedTuple):
    """The micro-batch of a batch that does not fit as a whole.

    Attributes:
        size: the most samples at a time; if nothing fits, how many take least.
        batch: the samples of the batch.
        fits: whether there is room for it, if need be once the allocator gives back what it caches.
        needed_bytes: what the step needs then.
        fn: the function that `step` takes, in words: of an object with a loss, it wants that.
    """

    size: int
    batch: int
    fits: bool
    needed_bytes: int
    fn: str = "fn"


class Answer(Shown):
    """The answer whether work fits, and what would help.

    Args:
        report: the step with the whole batch, beside the budget.
        micro_batch: the largest that fits, else the one that takes least; None if the whole fits,
            or can't be split.
    """

    _is_spaced = True

    def __init__(self, report: PeakReport, micro_batch: MicroBatch | None = None) -> None:
        self._report, self._micro_batch = report, micro_batch
        budget_bytes = report.budget_bytes
        self.fits = None if budget_bytes is None else report.fits(budget_bytes)
        # it takes predictions of its own, for which nobody waits if the work fits
        self._advice: tuple[Advice, ...] = () if self.fits else report.advice
        if micro_batch is not None:
            # That is half of the batch, whatever there is; here the size was looked for.
            others = (a for a in self._advice if not a.how.startswith("tenure.adaptive.step("))
            self._advice = tuple(others)

    def facts(self) -> dict[str, Any]:
        """Return the answer as values that JSON has."""
        budget_bytes, spare_bytes = self._report.budget_bytes, None
        if budget_bytes is not None:
            spare_bytes = budget_bytes - self._report.needed_bytes
            # it fits also if the allocator has to give back what it caches: nothing is left then
            spare_bytes = max(spare_bytes, 0) if self.fits else spare_bytes
        return {
            "fits": self.fits,
            "budget_bytes": budget_bytes,
            "spare_bytes": spare_bytes,
            "micro_batch": None if self._micro_batch is None else self._micro_batch._asdict(),
            "advice": plain(self._advice),
            "report": self._report.to_dict(),
        }

    def _parts(self) -> list[Part]:
        parts = list(self._report._parts())
        if self._micro_batch is not None:
            parts.append(Paragraph("", _in_words(self._micro_batch, self._report.budget_bytes)))
        for title, helps in (("What would help:", True), ("What would not help:", False)):
            advice = (each for each in self._advice if (each.saves_bytes > 0) is helps)
            if items := [f"- {each.summary()}\n    {each.how}" for each in advice]:
                parts.append(Paragraph(title, "\n".join(items)))
        return parts


def _in_words(found: MicroBatch, budget_bytes: int | None) -> str:
    needed = format_bytes(found.needed_bytes)
    takes = f"in micro-batches of {found.size} the step takes {needed}"
    if not found.fits:
        return f"No micro-batch fits: {takes}."
    if budget_bytes is not None and found.needed_bytes > budget_bytes:
        # what it needs in a memory without a limit is no answer to what fits in this one
        takes = (
            f"in micro-batches of {found.size} the step fits in {format_bytes(budget_bytes)} once "
            f"the allocator gives back what it caches: with more memory it would keep {needed}"
        )
    batch = f"the batch has {counted(found.batch, 'sample')}"
    how = f"Run it with tenure.adaptive.step({found.fn}, batch, maximum={found.size})"
    return f"The largest micro-batch that fits is {found.size}; {batch}; {takes}. {how}."


def answer(target: str, budget_bytes: int | None, device: str | None) -> Answer:
    """Say whether the work of a function fits.

    Args:
        target: ``MODULE:FUNCTION``.
        budget_bytes: what there is; None: what is free on the accelerator, if there is one.
        device: whose memory is meant, as of `predict_peak`; None: the accelerator's.

    Raises:
        CommandError: the target is no such function, or the program has raised an error.
    """
    if budget_bytes is not None:
        device = device or "cuda"
    else:
        budget_bytes, device = free_memory_of(device)
    try:
        # nothing that the program prints is part of the answer
        with contextlib.redirect_stdout(sys.stderr):
            fn, batch, *rest = _made_by(_loaded(target), target)
            optimizer = rest[0] if rest else None
            report = predict_peak(fn, batch, optimizer=optimizer, device=device)
            if budget_bytes is None:
                return Answer(report)
            report = report.against(budget_bytes)
            if report.fits(budget_bytes):
                return Answer(report)
            return Answer(report, largest_micro_batch(fn, batch, optimizer, device, budget_bytes))
    except TenureError:
        raise
    # exit codes say whether work fits: an error of the program is printed, and another one raised
    except (Exception, SystemExit) as error:
        entry = error.__traceback__
        while entry and entry.tb_next and package_of(entry.tb_frame) in ("tenure", "importlib"):
            entry = entry.tb_next
        traceback.print_exception(error.with_traceback(entry))
        raise CommandError(f"{target} raised {in_a_line(error)}.") from None


def free_memory_of(device: str | None) -> tuple[int | None, str | None]:
    """Return what is free on an accelerator, and its name; None and the name that was given else.

    Args:
        device: the accelerator; None: the one that is here.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    found = _devices.accelerator_of(device or present)
    free = None if found is None else _devices.free_memory(*found)
    return (None, device) if found is None or free is None else (free[0], str(found[1]))


def in_a_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    first = first_line(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error, and the next after a colon, to go on behind it."""
    first, _, rest = str(error).partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.strip().partition(chr(10))[0]}"
    return first.rstrip(".")


def _loaded(target: str) -> Callable[[], Any]:
    """Import what ``MODULE:FUNCTION`` names.

    Args:
        target: MODULE is a dotted name, looked for in the current directory first, or the path of a
            file, whose folder is then importable as that of a script is; FUNCTION may have dots.

    Raises:
        CommandError: there is no such thing, or it can't be called without arguments.
    """
    path, _, function_name = target.rpartition(":")
    if not path or not function_name:
        raise CommandError(
            f"{target!r} names no function. Write MODULE:FUNCTION, as train.py:setup."
        )
    # not `__main__`: what stands below `if __name__ == "__main__":` is the program's own work
    found: Any = _module(path)
    for name in function_name.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise CommandError(f"{path} has no function {function_name!r}. Is it defined there?")
    with contextlib.suppress(ValueError):  # of C
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise CommandError(
                f"{target} is called without arguments: {error}. Name a function that makes "
                "everything itself, or give these defaults."
            ) from None
    return found  # type: ignore[no-any-return]  # what it returns is looked at by whoever calls it


def _module(path: str) -> ModuleType:
    """Import a module by its name, or by the path of its file."""
    is_file = path.endswith(".py") or os.sep in path
    if is_file and not os.path.isfile(path):
        raise CommandError(f"There is no file {path!r}. Give the path of a Python file.")
    own = [os.path.dirname(os.path.abspath(path))] if is_file else []
    for folder in (os.getcwd(), *own):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    name = os.path.basename(path).removesuffix(".py") if is_file else path
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # one that it imports is missing: the traceback says more
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
        raise CommandError(
            f"There is no module {name!r}. It is looked for in this directory and among installed "
            "packages; a file can be given by its path, as src/train.py:setup."
        ) from None
    if is_file and os.path.realpath(module.__file__ or "") != os.path.realpath(path):
        raise CommandError(
            f"{path!r} has the name of another module, {module.__file__}. Rename the file."
        )
    return module


def _made_by(make: Callable[[], Any], name: str) -> tuple[Any, ...]:
    """Call a function on tensors without data; if it fails on these, call it as it is.

    Args:
        make: returns a function, a batch and possibly an optimizer.
        name: its name in errors.

    Raises:
        CommandError: it returns something else.
    """
    note = ""
    made: Any = None
    try:
        with without_data():
            made = make()
    except Exception as error:
        # as text: the error keeps alive what was made so far
        told = in_a_line(error)
        note = f"{name} fails on tensors without data ({told}): now it runs as it is, in memory."
    if note:
        print(note, file=sys.stderr)
        made = make()
    is_tuple = isinstance(made, tuple)
    values: tuple[Any, ...] = made if is_tuple else (made,)
    is_work = is_tuple and len(values) in (2, 3) and callable(values[0])
    if is_work and isinstance((*values, None)[2], Optimizer | None):
        return values
    # not the name of the class of a tensor without data
    kinds = ("Tensor" if isinstance(each, Tensor) else type(each).__name__ for each in values)
    shown = f"({', '.join(kinds)})" if is_tuple else next(kinds)
    raise CommandError(
        f"{name} returned {shown}. Return (fn, batch) or (fn, batch, optimizer), where fn takes "
        "the batch."
    )


def largest_micro_batch(
    fn: Callable[[Any], Any],
    batch: Any,
    optimizer: Optimizer | None,
    device: str | None,
    budget_bytes: int,
) -> MicroBatch | None:
    """Find in which micro-batches a step fits whose whole batch does not.

    Returns:
        The largest that fits, else the one that takes least. None if the batch can't be split.
    """
    spelled = "fn"

    def loss_of(part: Any) -> Tensor:
        """Return one number, as a step wants it, of all that a prediction runs backward."""
        nonlocal spelled
        result = fn(part)
        # as libraries return it, beside logits that nobody runs backward
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            spelled = "lambda batch: fn(batch).loss"
        losses = tensors_in([loss if isinstance(loss, Tensor) else result])
        sums = [each.sum() for each in losses if each.requires_grad]
        # inference has none, and a step wants one that it can run backward
        return sum(sums[1:], sums[0]) if sums else torch.zeros((), requires_grad=True)

    try:
        # a loop that sums gradients up by hand takes the samples of a norm as they come, too
        options: Any = {"optimizer": optimizer, "device": device, "batchnorm": "per_chunk"}
        found = plan(loss_of, batch, budget_bytes, margin=0, **options)
    except OutOfRetriesError as error:
        # the whole was the first that was tried
        n_samples = error.sizes[0]
        if n_samples < 2 or error.least is None:
            return None
        size, needed_bytes = error.least
        return MicroBatch(size, n_samples, False, needed_bytes, spelled)
    except (AdaptiveUsageError, BatchCoupledError):
        return None
    # maximum=found.micro_batch may leave no last part of one sample, so that parts are smaller
    return MicroBatch(max(found.sizes), found.n_samples, True, found.needed_bytes, spelled)
