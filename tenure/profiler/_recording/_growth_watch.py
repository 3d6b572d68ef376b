"""When to look for growth: after steps of an optimizer, or between calls of a model.

A look searches the heap, so there are few: one each time the steps have doubled.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._torch.compiler import never_compiled
from tenure._torch.modules import is_called_by_module, modules_told

from .._reports import Snapshot, snapshot
from ._growth import LOOKS, Growth, Look, grown, looked_at

# A loop that looks itself may look often: of these the last stay, and those of doubled steps.
_MOST_LOOKS = 32
# Up to this step there are looks halfway between two of them, for a program of a few steps.
_HALFWAY = 8
# A training loop may call its model several times before its first step.
_FIRST_CALL = 4
# Of optimizers, or models, that take turns the first one counts, if fewer turns come in between.
_OTHERS = 16


class GrowthWatch:
    """Looks at the tensors of the process as a program trains or evaluates.

    It looks after some steps of an optimizer, or, as long as there was none, between some calls of
    a model: at 1, 2, 3, 4, 6, 8, 16, 32 and so on. A loop with neither has it look by `look`, and
    needs no block.

    Attributes:
        n_looks: how often it has looked.
        notes: why it has stopped looking, if it has.

    Example:
        >>> import torch
        >>> from tenure.profiler import GrowthWatch
        >>> model, losses = torch.nn.Linear(2, 1), []
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with GrowthWatch() as watch:
        ...     for _ in range(4):
        ...         loss = model(torch.ones(8, 2)).mean()
        ...         losses.append(loss)
        ...         loss.backward()
        ...         optimizer.step()
        >>> (found,) = watch.growth()  # printed, it says that `losses` grew
        >>> found.n_tensors - found.n_before, found.last_step
        (3, 4)
    """

    def __init__(self) -> None:
        self.n_looks = 0
        self.notes: list[str] = []
        self._n_steps = 0
        self._next = _FIRST_CALL
        self._looks: list[Look] = []
        # whether the program has gone on since the last look
        self._is_further = True
        self._is_training = False
        # whose steps or calls count, and how many of others came since
        self._counted: weakref.ref[object] | None = None
        self._n_others = 0
        # all that had a turn and live, by identity: one that dies leaves nothing here
        self._known: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        self._hook: Any = None
        self._calls = ExitStack()
        self._before_look: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Look from now on; a second time does nothing."""
        if self._hook is not None:
            return
        self._hook = register_optimizer_step_post_hook(self._after_step)
        if not self._is_training:
            self._calls.enter_context(modules_told(self._before_call))

    def end(self) -> None:
        """Look no more; what was seen stays."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._calls.close()

    def __enter__(self) -> Self:
        """Look while a block runs."""
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self.end()

    def look(self, step: int) -> Snapshot:
        """Look now.

        Args:
            step: how many steps there were before; more than at the look before.

        Returns:
            What it saw.
        """
        seen = snapshot()
        self._looks.append(self._looked_at(step, seen, self._looks))
        if len(self._looks) > _MOST_LOOKS:
            at = (i for i, each in enumerate(self._looks) if each.step & (each.step - 1))
            del self._looks[next(at, 0)]
        self._n_steps = max(step, self._n_steps)
        self._is_further = True
        self.n_looks += 1
        return seen

    def growth(self, at_end: Snapshot | None = None) -> tuple[Growth, ...]:
        """Return the piles that grew, the largest first.

        Args:
            at_end: what is alive at the end, which is one look more if a step came since the last
                one.
        """
        # a look after the last step sees what the end sees
        looks = self._looks if self._is_further else self._looks[:-1]
        end = None if at_end is None else self._looked_at(self._n_steps, at_end, looks)
        if self.n_looks + (end is not None and self._is_further) < LOOKS:
            return ()
        found = grown(self._looks)
        if end is not None:
            # a variable of a function that has returned is judged by the looks that saw it
            gone = {place: each for place, each in found.items() if place not in end.piles}
            found = gone | grown([*looks, end])
        return tuple(sorted(found.values(), key=lambda each: (-each.grown_bytes, each.name)))

    def _looks_told(self, *, with_end: bool) -> dict[str, Any]:
        """Return how often it looked and when, as a recording has it.

        Args:
            with_end: whether the end was looked at, which counts if a step came since.
        """
        steps = [look.step for look in self._looks]
        is_one_more = with_end and self._is_further
        return {
            "n_looks": self.n_looks + is_one_more,
            "look_steps": (*steps, *[self._n_steps] * is_one_more),
            "n_steps": self._n_steps,
        }

    def _looked_at(self, step: int, seen: Snapshot, looks: list[Look]) -> Look:
        return looked_at(step, seen._entries, looks[-1] if looks else None)

    # --- when to look

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_training:
            # count steps instead of calls of a model
            self._is_training = True
            self._calls.close()
            self._looks.clear()
            self._counted, self._n_others = None, 0
            self._n_steps, self._next, self.n_looks = 0, 1, 0
        self._turn_ended(optimizer)

    @never_compiled
    def _before_call(self, module: nn.Module, values: object) -> None:
        if not self._is_training and not is_called_by_module(sys._getframe(1)):
            self._turn_ended(module)

    def _turn_ended(self, of: object) -> None:
        counted = None if self._counted is None else self._counted()
        if counted is not of:
            # one that a step has made for itself counts at once
            is_new = self._known.get(id(of)) is not of
            self._known[id(of)] = of
            self._n_others += 1
            if counted is not None and not is_new and self._n_others < _OTHERS:
                return
            self._counted = weakref.ref(of)
        self._n_others = 0
        self._n_steps += 1
        self._is_further = True
        if self._n_steps < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            if self._before_look is not None:
                self._before_look()
            self._next = _after(self._n_steps)
            self.look(self._n_steps)
            self._is_further = False
        # an error in here would be one of the program's step
        except Exception as error:
            self.notes.append(f"it looked for growth up to step {self._n_steps}: {error!r}")
            self._next = sys.maxsize
        finally:
            self._lock.release()


def _after(step: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 16, 32 and so on."""
    power = 1 << step.bit_length()
    halfway = power * 3 // 4
    return halfway if step < halfway and power <= _HALFWAY else power
