"""The verb that says whether work fits on a device, without running it."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure._errors import CommandError, TenureError

from ._printing import print_text, write_file
from ._run import check_target
from ._verb import Verb, byte_size, device_name
from ._waiting import waiting

if TYPE_CHECKING:
    from tenure._show import Paragraph
    from tenure.adaptive import Advice, PeakReport

    from ._work_to_fit import MicroBatch

_FITS, _DOES_NOT = 0, 1
# what every terminal has; the tables of reports are no wider than it either
_COLUMNS = 80
_INDENT = 4 * " "


class Fit(Verb):
    """Say whether work fits into the memory of a device, without running it.

    FUNCTION takes no arguments and returns (fn, batch) or (fn, batch, optimizer): a step is
    fn(batch), the backward pass of what that returns, and a step of the optimizer. It is called on
    tensors without data, so a model of any size takes no memory. The step runs on such tensors too:
    once, and about 20 times more if it does not fit, for a second or two each if the model is
    large. --device says whose memory is meant; this machine need not have the device.

    MODULE is a dotted name, looked for in this directory first, or the path of a .py file.

    Exit code: 0 where it fits, or no memory is known to compare with; 1 where it does not; 2 for a
    mistake, among them any error of FUNCTION and of the step.
    """

    name = "fit"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("target", metavar="MODULE:FUNCTION", help="as train.py:setup")
        parser.add_argument(
            "--device-memory",
            type=byte_size,
            metavar="SIZE",
            help="what there is, as 24GiB (default: what is free on the accelerator, if any)",
        )
        parser.add_argument(
            "--device",
            type=device_name,
            metavar="DEVICE",
            help="whose memory is meant (default: cuda with --device-memory, else the accelerator, "
            "else where the tensors are)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("--html", metavar="FILE", help="write a page of HTML, too")
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="write to FILE what else is printed"
        )
        parser.add_argument("-f", "--force", action="store_true", help="overwrite FILE")

    def run(self, arguments: argparse.Namespace) -> int:
        """Predict the step, and compare."""
        # it may take minutes, which are not to be lost on a name
        for path in filter(None, (arguments.html, arguments.output)):
            check_target(Path(path), replace=arguments.force, may_be_device=True)
        with waiting(f"fit {arguments.target}") as show:
            show("loads torch")
            budget_bytes, device = _memory(arguments.device_memory, arguments.device)
            # what the program prints is no part of the answer
            with contextlib.redirect_stdout(sys.stderr), _their_errors(arguments.target):
                answer = _answer(arguments.target, budget_bytes, device, show)
            show("looks for what would help")
            if arguments.html:
                write_file(arguments.html, answer.page(f"tenure fit {arguments.target}"))
            shown = json.dumps(answer.facts(), indent=2) if arguments.json else str(answer)
        if arguments.output:
            write_file(arguments.output, f"{shown}\n")
        elif arguments.json or not sys.stdout.isatty():
            print_text(shown)
        else:
            answer.print_in_colours()
        return _DOES_NOT if answer.fits is False else _FITS


class _Answer(NamedTuple):
    """What is printed.

    Attributes:
        report: the step with the whole batch, beside the budget.
        micro_batch: the largest that fits, else what takes least; None where the whole fits, or
            can't be split.
    """

    report: PeakReport
    micro_batch: MicroBatch | None

    @property
    def advice(self) -> tuple[Advice, ...]:
        # it takes predictions of its own, which nobody waits for where the work fits
        advice = () if self.fits else self.report.advice
        if self.micro_batch is None:
            return advice
        # That is half of the batch, whatever there is; here the size was looked for.
        return tuple(each for each in advice if not each.how.startswith("tenure.adaptive.step("))

    @property
    def fits(self) -> bool | None:
        budget_bytes = self.report.budget_bytes
        return None if budget_bytes is None else self.report.fits(budget_bytes)

    @property
    def spare_bytes(self) -> int | None:
        """What is left; below 0 where it does not fit."""
        if self.report.budget_bytes is None:
            return None
        left_bytes = self.report.budget_bytes - self.report.needed_bytes
        # it fits also where the allocator has to give back what it caches, and then nothing is left
        return max(left_bytes, 0) if self.fits else left_bytes

    def facts(self) -> dict[str, Any]:
        from tenure._show import plain

        facts: dict[str, Any] = {
            "fits": self.fits,
            "budget_bytes": self.report.budget_bytes,
            "spare_bytes": self.spare_bytes,
            "micro_batch": None,
            "advice": plain(self.advice),
            "report": self.report.to_dict(),
        }
        if self.micro_batch is not None:
            facts["micro_batch"] = {
                "size": self.micro_batch.size,
                "batch": self.micro_batch.n_samples,
                "fits": self.micro_batch.fits,
                "needed_bytes": self.micro_batch.needed_bytes,
            }
        return facts

    def notes(self) -> list[Paragraph]:
        """What is said below the report, in lines for a terminal."""
        from tenure._show import Paragraph

        notes = []
        if self.micro_batch is not None:
            notes.append(
                Paragraph("", _broken(_in_words(self.micro_batch, self.report.budget_bytes)))
            )
        helps = [each for each in self.advice if each.saves_bytes > 0]
        does_not = [each for each in self.advice if each.saves_bytes <= 0]
        for title, advice in (("What would help:", helps), ("What would not help:", does_not)):
            if advice:
                notes.append(Paragraph(title, "\n".join(map(_as_an_item, advice))))
        return notes

    def __str__(self) -> str:
        return "\n\n".join([str(self.report), *(note.text() for note in self.notes())])

    def page(self, title: str) -> str:
        from tenure._show import page

        return page(title, self.report._repr_html_() + "".join(n.html() for n in self.notes()))

    def print_in_colours(self) -> None:
        from rich.console import Console

        console = Console()
        console.print(self.report)
        for note in self.notes():
            console.print()
            console.print(note)


def _in_words(found: MicroBatch, budget_bytes: int | None) -> str:
    from tenure._text import counted, format_bytes

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
    batch = f"the batch has {counted(found.n_samples, 'sample')}"
    how = f"Run it with tenure.adaptive.step(fn, batch, maximum={found.size})"
    return f"The largest micro-batch that fits is {found.size}; {batch}; {takes}. {how}."


def _as_an_item(advice: Advice) -> str:
    """A change and its effect, and below it the line of Python that makes it."""
    return f"{_broken(advice.summary(), '- ')}\n{_broken_code(advice.how)}"


def _broken(text: str, first: str = "") -> str:
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        # names and options stay what they are
        break_long_words=False,
        break_on_hyphens=False,
    )


def _broken_code(code: str) -> str:
    """Lines that Python reads as one: each ends inside of brackets."""
    lines = [_INDENT]
    for part in re.findall(r".+?(?:\((?!\))|, |$)", code):
        if len(lines[-1] + part.rstrip()) > _COLUMNS and lines[-1].strip():
            lines.append(2 * _INDENT)
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _answer(
    target: str, budget_bytes: int | None, device: str | None, show: Callable[[str], None]
) -> _Answer:
    from tenure.adaptive import predict_peak

    from ._work_to_fit import largest_micro_batch, load_function, made_by

    show("makes the model and the batch")
    fn, batch, optimizer = made_by(load_function(target), target)
    show("predicts the whole batch")
    report = predict_peak(fn, batch, optimizer=optimizer, device=device)
    if str(Path("_cli", "_fit.py")) in report.place:
        # the step of an optimizer is called from here, and has no line in the program
        report = replace(report, place="")
    if budget_bytes is None:
        return _Answer(report, None)
    report = report.against(budget_bytes)
    if report.fits(budget_bytes):
        return _Answer(report, None)
    show("looks for a micro-batch that fits")
    return _Answer(report, largest_micro_batch(fn, batch, optimizer, device, budget_bytes))


def _memory(budget_bytes: int | None, device: str | None) -> tuple[int | None, str | None]:
    """What there is, and whose it is."""
    if budget_bytes is not None:
        return budget_bytes, device or "cuda"
    import torch

    from tenure._devices import accelerator_of, told_by

    present = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator_of(device or present)
    told = None if found is None else told_by(found[0], "mem_get_info", found[1])
    return (None, device) if found is None or told is None else (int(told[0]), str(found[1]))


@contextlib.contextmanager
def _their_errors(target: str) -> Iterator[None]:
    """Exit codes say whether work fits: an error of the program is told, and ends with another."""
    try:
        yield
    except TenureError:
        raise
    except (Exception, SystemExit) as error:
        from ._work_to_fit import in_a_line

        traceback.print_exception(error.with_traceback(_from_theirs(error.__traceback__)))
        raise CommandError(f"{target} raised {in_a_line(error)}.") from None


def _from_theirs(all_frames: TracebackType | None) -> TracebackType | None:
    """The frames from the first that is no longer ours; all, where each of them is."""
    frames = all_frames
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    return frames or all_frames


def _is_ours(frames: TracebackType) -> bool:
    from tenure._callers import package_of

    return package_of(frames.tb_frame) in ("tenure", "importlib", "runpy")
