"""A callback that watches memory, for the trainers of both libraries.

Invariant: it changes nothing, and each library's Trainer takes it for a Callback of its own.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from tenure._extras import install_command, require_new_enough

from .._memory_watch import MemoryWatch

_HOMES = ("lightning.pytorch", "pytorch_lightning")
# To type checkers, a Callback of either library.
_Callback: Any = object
_EVALUATIONS = {
    "sanity_check": "validation", "validate": "validation", "test": "test", "predict": "predict",
}  # fmt: skip
"""The methods that evaluate, by what a Trainer calls its stage."""


class MemoryCallback(_Callback):  # type: ignore[misc]  # of Any, on purpose
    """A callback that logs memory and retries, and reports what held memory if it runs out.

    Pass it to a Trainer: ``Trainer(callbacks=[MemoryCallback()])``. It logs these numbers, as often
    as ``log_every_n_steps`` says:

    - ``memory/allocated_bytes``, ``memory/growth_bytes``: the bytes that the device's allocator
      counts, and their growth since the last log; on the CPU those of all tensors.
    - ``memory/outlived_tensors``, ``memory/outlived_bytes``: the growth, since the first scan, of
      containers that held more at each scan than at the one before.
    - ``adaptive/retries``, and of an AdaptiveMixin ``adaptive/micro_batch``: the failed attempts
      since the last log, and the largest micro-batch of the last step.

    All tensors are scanned at steps 1, 4 and 7, and then as often as ``share`` allows. If a fit
    runs out of memory, a report is logged and added to the traceback.

    Args:
        share: the share of the time that scans may take.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a callback of the libraries that are there."""
        if not _imported():
            _import_one()
        kind: Any = cls
        made: Self = object.__new__(_with_bases(kind, _imported()))
        return made

    def __init__(self, share: float = 0.03) -> None:
        super().__init__()
        self._share = share
        self._watch = MemoryWatch(share)
        self._step = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new object that has seen nothing."""
        return getattr(type(self), "_written", type(self)), (self._share,)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._watch.begin(pl_module.device)
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look, if it is time, and log."""
        # a batch that only adds to gradients is no step
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._watch.step_ended(getattr(pl_module, "adaptive_result", None))
        every = trainer.log_every_n_steps
        if every and not self._step % every and not trainer.barebones:
            figures = {name: float(value) for name, value in self._watch.figures().items()}
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def report(self) -> str:
        """Return what holds memory now, in a few lines; in a notebook, call it after an error."""
        return self._watch.report()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell what holds memory, if that is what ran out."""
        method = _EVALUATIONS.get(str(getattr(trainer.state.stage, "value", "")))
        self._watch.died(
            exception,
            f"  A {method}_step is not split by itself: a function in it with "
            "@tenure.adaptive.execute.chunked(batch, collect=metric) runs in pieces that fit, and "
            'collect="host" brings predictions to the host.'
            if method
            else "",
        )


def _imported() -> tuple[str, ...]:
    return tuple([home for home in _HOMES if home in sys.modules])


@functools.cache
def _with_bases(cls: Any, homes: tuple[str, ...]) -> Any:
    """Return a class with the Callbacks of some libraries, which are imported."""
    bases = [sys.modules[home].Callback for home in homes]
    missing = [base for base in bases if not issubclass(cls, base)]
    if not missing:
        return cls
    space = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
        # by which a copy finds the class: this one stands nowhere
        "_written": cls,
    }  # fmt: skip
    return type(cls.__name__, (cls, *missing), space)


def check_installed() -> None:
    """Make sure that one of the libraries is installed and new enough, without an import.

    Raises:
        ImportError: none is.
    """
    if all(find_spec(home.partition(".")[0]) is None for home in _HOMES):
        raise ImportError(
            "tenure.integrations.lightning needs lightning or pytorch_lightning, and neither is "
            f"installed. Install the first with: {install_command('lightning')}.",
            name="lightning",
        )
    require_new_enough("lightning", "pytorch-lightning")


def _import_one() -> None:
    installed = next(home for home in _HOMES if find_spec(home.partition(".")[0]) is not None)
    import_module(installed)
