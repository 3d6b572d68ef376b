"""Lightning: a LightningModule whose training steps fit, and a callback that watches memory.

Both packages are served, `lightning` and `pytorch_lightning`. Invariant: the loop of the trainer
runs as it is. `training_step` makes the gradients, in as few micro-batches as fit, and returns a
loss whose backward pass delivers them when Lightning calls it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled
from tenure.adaptive import StepResult

from ._lightning import (
    MARK,
    MemoryCallback,
    check_fit,
    check_installed,
    fitting_step,
    is_trained,
    recorder_of,
)

check_installed()
__all__ = ["AdaptiveMixin", "MemoryCallback"]


class AdaptiveMixin:
    """Lets the training steps of a LightningModule fit, with the gradients of the whole batch.

    Put it first: ``class Net(AdaptiveMixin, LightningModule)``. Where `training_step` runs out of
    memory, it runs again in micro-batches, by `tenure.adaptive.step`, which verifies itself. What
    it logs, returns and gives to metrics is told once, as of the whole batch. The Tuner's
    ``scale_batch_size`` finds no limit, because batches are split.

    Attributes:
        adaptive_options: arguments of `step`, such as ``weight``, ``batchnorm``, ``minimum``,
            ``in_dims``: a dict of the class, or a property.
        adaptive_result: what the last step did, such as its ``sizes``; None before the first.

    Raises:
        AdaptiveUsageError: when the fit begins: the optimization is manual, the trainer has several
            devices, an option is one that Lightning decides, or ``training_step`` takes the
            iterator of its loader or was set after its class was made. When a class is made: the
            mixin comes after the LightningModule. In a step: as `tenure.adaptive.step`.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> from tenure.integrations.lightning import AdaptiveMixin
        >>> class Net(AdaptiveMixin, LightningModule):
        ...     adaptive_options = {"weight": lambda batch: (batch["labels"] != -100).sum()}
    """

    # without a value, which would stand before that of a LightningModule that comes after
    adaptive_options: Mapping[str, Any]
    adaptive_result: StepResult | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_order(cls)
        # methods of the mixin's own would stand behind those that the class defines
        for name, wrapped in (("training_step", _fitting), ("on_fit_start", _checked)):
            written = _written(cls, name)
            if written is not None:
                setattr(cls, name, wrapped(written))

    @never_compiled
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value; inside of `training_step`, when the step of its batch has worked."""
        written = super().log  # type: ignore[misc]
        recorder = recorder_of(self)
        if recorder is None:
            written(name, value, *args, **kwargs)
            return
        by_position = list(inspect.signature(written).parameters)[2:]
        options = dict(zip(by_position, args, strict=False)) | kwargs
        # None is what each option is that nobody has given
        recorder.log(name, value, {k: v for k, v in options.items() if v is not None})

    @never_compiled
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log values; inside of `training_step` as `log` does."""
        written = super().log_dict  # type: ignore[misc]
        if recorder_of(self) is not None:
            # its default would come to `log` as a mean that the user has asked for
            given = inspect.signature(written).bind(dictionary, *args, **kwargs).arguments
            kwargs = {"reduce_fx": None, **kwargs} if "reduce_fx" not in given else kwargs
        written(dictionary, *args, **kwargs)


def _check_order(cls: type) -> None:
    names = [kind.__name__ for kind in cls.__mro__]
    if "LightningModule" in names and names.index("LightningModule") < names.index("AdaptiveMixin"):
        raise AdaptiveUsageError(
            f"{cls.__name__} has AdaptiveMixin after its LightningModule, where it changes "
            f"nothing. Put it first: class {cls.__name__}(AdaptiveMixin, ...)."
        )


def _written(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the method as the user or Lightning wrote it; None if it is wrapped already."""
    owner = next((kind for kind in cls.__mro__ if name in vars(kind)), None)
    if owner is None:
        return None
    # that of Lightning only says that there is none
    is_placeholder = name == "training_step" and owner.__name__ == "LightningModule"
    function: Callable[..., Any] = vars(owner)[name]
    return None if is_placeholder or hasattr(function, MARK) else function


def _checked(written: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(written)
    def on_fit_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_fit(self)
        return written(self, *args, **kwargs)

    setattr(on_fit_start, MARK, True)
    return on_fit_start


def _fitting(written: Callable[..., Any]) -> Callable[..., Any]:
    @never_compiled
    @functools.wraps(written)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # that of a class below, which calls this one by super(), fits already
        if recorder_of(self) is not None or not args or not is_trained(self):
            return written(self, *args, **kwargs)
        return fitting_step(self, written, args, kwargs)

    setattr(training_step, MARK, True)
    return training_step
