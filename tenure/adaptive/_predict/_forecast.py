"""What sizes of a piece of work would need, asked of predictions; nothing where one fails.

Invariant: whatever goes wrong in a prediction, no error leaves it, and an optimizer has stepped
nothing: its state would be that of tensors without data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenure._errors import PredictionError

from ._predict import predict_peak

_logger = logging.getLogger("tenure.adaptive")


class Forecast:
    """The bytes that sizes of a piece of work need beside what is there.

    Args:
        name: what the log calls the work.
        work: gets a size; its result is ignored. It runs on tensors without data, once for each
            size that is asked for.

    Attributes:
        works: whether all predictions so far succeeded.
    """

    __slots__ = ("_known", "_name", "_work", "works")

    def __init__(self, name: str, work: Callable[[int], object]) -> None:
        self._name = name
        self._work = work
        self._known: dict[int, int] = {}
        self.works = True

    def __call__(self, size: int) -> int:
        """The bytes of one size; where that can't be predicted, in proportion to another, or 0."""
        if size not in self._known and self.works:
            self._predict(size)
        if size in self._known or not self._known:
            return self._known.get(size, 0)
        # for one that is none of those that could be predicted
        nearest = min(self._known, key=lambda known: abs(known - size))
        return -(-self._known[nearest] * size // nearest)

    def _predict(self, size: int) -> None:
        work = self._work

        # what a search for a size ignores: the result is not run backward
        def ignoring(size: int) -> None:
            work(size)

        try:
            with _no_steps():
                report = predict_peak(ignoring, size)
        # of the work, which may do anything, or of what has no fakes
        except Exception as error:
            self.works = False
            first_line = str(error).partition("\n")[0]
            _logger.info(
                "%r goes on without predictions: size %d could not be predicted (%s: %s)",
                self._name, size, type(error).__name__, first_line,
            )  # fmt: skip
        else:
            self._known[size] = max(0, report.peak_bytes - report.baseline_bytes)


@contextmanager
def _no_steps() -> Iterator[None]:
    thread = threading.get_ident()

    def refuse(*_: Any) -> None:
        if threading.get_ident() == thread:
            raise PredictionError(
                "An optimizer steps inside the work: what it keeps can't be predicted and then "
                "taken back."
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
