"""What memory does while a Trainer trains, in its log; and at its death, what held it.

Invariant: a callback changes nothing of the training, and is told of no error: what ended a program
is read when it exits.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._memory_watch import MemoryWatch

if TYPE_CHECKING:
    from tenure.adaptive import StepResult

# told in every log of a step: a log that has it has all figures
_MARK = "adaptive/retries"


class MemoryCallback(TrainerCallback):
    """A callback of any Trainer that logs memory, and reports what held it if it runs out.

    It logs these numbers:

    - ``memory/allocated_bytes``, ``memory/growth_bytes``: the bytes that the device's allocator
      counts, and their growth since the last log; on the CPU those of all tensors.
    - ``memory/outlived_tensors``, ``memory/outlived_bytes``: the growth, since the first scan, of
      containers that held more at each scan than at the one before.
    - ``adaptive/micro_batch``, ``adaptive/retries``: the largest micro-batch of the last step, and
      the failed attempts since the last log.

    All tensors are scanned at steps 1, 4 and 7, and then as often as ``share`` allows. In an
    adaptive trainer the numbers reach all other callbacks. In others they reach the callbacks after
    it and ``state.log_history``; put it first with
    ``trainer.callback_handler.callbacks.insert(0, MemoryCallback())``.

    Args:
        share: the share of the time that scans may take.

    Attributes:
        adaptive_result: the result of the last step of an adaptive trainer.
    """

    def __init__(self, share: float = 0.03) -> None:
        self.adaptive_result: StepResult | None = None
        self._watch = MemoryWatch(share)
        self._is_told = True

    def report(self) -> str:
        """Return what holds memory now, in a few lines; in a notebook, call it after an error."""
        return self._watch.report()

    def add_to(self, logs: dict[str, float]) -> None:
        """Add the figures to the log of training steps, once; other logs stay as they are."""
        if "loss" in logs and _MARK not in logs:
            logs.update(self._watch.figures())

    def died(self, error: BaseException) -> None:
        """Training ended with an error: of one of memory, tell what holds that."""
        if not self._is_told:
            self._is_told = True
            self._watch.died(error)
        atexit.unregister(self._exit)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        self._watch.begin(args.device)
        self._is_told = False
        # a callback is told of no error; what ended the program can be read when it exits
        atexit.register(self._exit)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look, if it is time."""
        self._watch.step_ended(self.adaptive_result)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add figures where the trainer has not."""
        if logs is None or _MARK in logs:
            return
        self.add_to(logs)
        # the trainer has copied the log into its history before
        if _MARK in logs and state.log_history:
            state.log_history[-1].update(
                {key: value for key, value in logs.items() if key not in state.log_history[-1]}
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training has not died."""
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.died(error)
