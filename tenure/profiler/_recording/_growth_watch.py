"""When to look for growth: after steps of an optimizer, or between calls of a model.

A look searches the heap, so there are few: one each time the steps have doubled, whatever it costs,
and, for a share of the time, where more memory is allocated than since the look before. Between two
looks one figure of the allocator is read, at the most.

Invariant: whatever time looks take, there is one in each of the last halvings of the steps.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter, thread_time
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._host_memory import allocated_bytes
from tenure._torch.modules import is_called_by_module, modules_told

from .._reports import Snapshot, snapshot
from ._growth import Growth, grown, held
from ._judged import LOOKS
from ._looks import Look, looked_at, without

# Looks that decide, and how many of them are those of doubled steps, which see what is slow.
_KEPT, _KEPT_DOUBLED = 16, 8
# Up to this step there are looks halfway between two of them, for a program of a few steps.
_HALFWAY = 8
# The share of the time that looks in between may take, and that readings of the allocator may.
_SHARE_OF_LOOKS, _SHARE_OF_READINGS = 0.03, 0.02
# A reading takes up to a tenth of a millisecond, so that a short program can have as many.
_FIRST_READINGS = 256
# A tensor takes some hundred bytes besides its data; less is not worth a look.
_HIGHER_BYTES = 256
# A training loop may call its model several times before its first step.
_FIRST_CALL = 4
# Of optimizers, or models, that take turns the first one counts, if fewer turns come in between.
_OTHERS = 16


class GrowthWatch:
    """Looks at the tensors of the process as a program trains or evaluates.

    It looks after some steps of an optimizer, or, as long as there was none, between some calls of
    a model: at 1, 2, 3, 4, 6, 8, 16, 32 and so on, and in between when more memory is allocated
    than since the look before, for a few percent of the time. A loop with neither has it look by
    `look`, and needs no block.

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
        self._turns = _Turns()
        self._level = _Level()
        self._is_training = False
        self._hook: Any = None
        self._calls = ExitStack()
        self._before_look: Callable[[], object] | None = None
        self._began, self._looked_s = 0.0, 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Look from now on; a second time does nothing."""
        if self._hook is not None:
            return
        self._began = perf_counter()
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
        self._looks.append(self._looked_at(step, seen))
        self._thin_out()
        self._n_steps = max(step, self._n_steps)
        self._is_further = True
        self.n_looks += 1
        return seen

    def growth(self, at_end: Snapshot | None = None) -> tuple[Growth, ...]:
        """What grew, the largest first.

        Args:
            at_end: what is alive at the end, which is one look more if a step came since the last
                one. If there were too few looks to see growth, containers that hold several tensors
                then are reported instead; None reports nothing then.
        """
        end = None if at_end is None else self._looked_at(self._n_steps, at_end)
        if self.n_looks + (end is not None and self._is_further) >= LOOKS:
            found = self._grown_up_to(end)
        else:
            found = [] if end is None else held(end._replace(step=0))
        return tuple(sorted(found, key=lambda each: (-each.grown_bytes, each.name)))

    def _looks_told(self, *, with_end: bool) -> dict[str, Any]:
        """How often it looked and when, as a recording has it.

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

    def _looked_at(self, step: int, seen: Snapshot) -> Look:
        return looked_at(step, seen._entries, self._looks[-1] if self._looks else None)

    def _grown_up_to(self, end: Look | None) -> list[Growth]:
        found = grown(self._looks, until=self._level.quiet_until)
        if end is not None:
            # a variable of a function that has returned is judged by the looks that saw it
            found = {place: each for place, each in found.items() if place not in end.places}
            looks = self._looks
            if not self._is_further:
                looks, last = looks[:-1], looks[-1]
                end = without(last, looks[-1], end)
            found.update(grown([*looks, end], until=end.step))
        return [*found.values()]

    def _thin_out(self) -> None:
        """Leave the last looks, and of those before them the ones of doubled steps."""
        if len(self._looks) <= _KEPT:
            return
        others = [i for i, look in enumerate(self._looks) if look.step & (look.step - 1)]
        at = others[0] if others and len(self._looks) - len(others) <= _KEPT_DOUBLED else 0
        dropped = self._looks.pop(at)
        if 0 < at < len(self._looks):
            self._looks[at] = without(dropped, self._looks[at - 1], self._looks[at])

    # --- when to look

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_training:
            self._begin_training()
        if self._turns.is_turn_of(optimizer):
            self._step_ended()

    def _begin_training(self) -> None:
        """Count steps instead of calls of a model."""
        self._is_training = True
        self._calls.close()
        self._looks.clear()
        self._turns, self._n_steps, self._next, self.n_looks = _Turns(), 0, 1, 0

    def _before_call(self, module: nn.Module) -> None:
        if self._is_training or is_called_by_module(sys._getframe(1)):
            return
        if self._turns.is_turn_of(module):
            self._step_ended()

    def _step_ended(self) -> None:
        self._n_steps += 1
        self._is_further = True
        if not self._is_due() or not self._lock.acquire(blocking=False):
            return
        try:
            self._look_in_turn()
        # an error in here would be one of the program's step
        except Exception as error:
            self.notes.append(f"it looked for growth up to step {self._n_steps}: {error!r}")
            self._next = sys.maxsize
        finally:
            self._lock.release()

    def _is_due(self) -> bool:
        if self._next == sys.maxsize or not (self._is_training or self._n_steps >= _FIRST_CALL):
            return False
        if self._n_steps >= self._next:
            return True
        now = perf_counter()
        is_higher = self._level.is_higher(now, self._n_steps)
        return is_higher and self._looked_s < _SHARE_OF_LOOKS * (now - self._began)

    def _look_in_turn(self) -> None:
        began = perf_counter()
        if self._before_look is not None:
            self._before_look()
        self.look(self._n_steps)
        self._is_further = False
        self._level.looked()
        self._looked_s += perf_counter() - began
        self._next = _after(self._n_steps)


class _Turns:
    """Of several optimizers, or models, the one whose turns are counted.

    After the turn of another one, other tensors are alive.
    """

    def __init__(self) -> None:
        self._first: weakref.ref[object] | None = None
        self._n_others = 0

    def is_turn_of(self, each: object) -> bool:
        first = None if self._first is None else self._first()
        if first is not each:
            self._n_others += 1
            if first is not None and self._n_others < _OTHERS:
                return False
            self._first = weakref.ref(each)
        self._n_others = 0
        return True


class _Level:
    """The bytes that the process has allocated, read for no more than a share of the time.

    Attributes:
        quiet_until: the last step after which they were no more than at any since the last look.
    """

    def __init__(self) -> None:
        self.quiet_until = 0
        self._lowest_bytes: int | None = None
        self._n_readings = 0
        self._due = 0.0

    def is_higher(self, now: float, step: int) -> bool:
        """Whether there are more than there were; False as long as it is not read again."""
        if now < self._due and self._n_readings >= _FIRST_READINGS:
            return False
        self._n_readings += 1
        # not by the clock: the process may wait for a core meanwhile
        began = thread_time()
        n_bytes = allocated_bytes()
        self._due = now + (thread_time() - began) / _SHARE_OF_READINGS
        lowest = self._lowest_bytes
        if lowest is None:
            # nothing to compare with tells nothing
            self._lowest_bytes = n_bytes
            return False
        # garbage of before may go after a look, and must not hide what comes
        self._lowest_bytes = min(lowest, n_bytes)
        if n_bytes > lowest + _HIGHER_BYTES:
            return True
        self.quiet_until = step
        return False

    def looked(self) -> None:
        """Compare from the next step on, because the look may have left something behind."""
        self._lowest_bytes = None


def _after(step: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 16, 32 and so on."""
    power = 1 << step.bit_length()
    halfway = power * 3 // 4
    return halfway if step < halfway and power <= _HALFWAY else power
