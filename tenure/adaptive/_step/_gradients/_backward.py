"""Running backward inside a step: into gradients of its own, at the precision of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._torch.autograd import BACKWARD_TWICE, post_hooks_of
from tenure._torch.quiet import without_functions

from ._delegated import Backward, DelegatedBackward
from ._isolated import IsolatedGradients, leaves_of
from ._zeros import giving_zeros


class Scaler(Protocol):
    """What `step` uses of a ``torch.amp.GradScaler``."""

    def scale(self, outputs: Tensor) -> Any:
        """Return the loss times the scale."""


class SplitBackward:
    """The backward passes of one attempt.

    Args:
        gradients: where they leave what they make.
        scaler: scales losses, or None.
        function: runs them backward in place of autograd, or None.
        computed: names the captured tensors that come of a computation of before.
    """

    def __init__(
        self,
        gradients: IsolatedGradients,
        scaler: Scaler | None,
        function: Backward | None,
        computed: Callable[[], list[str]],
    ) -> None:
        self._gradients = gradients
        self._scaler = scaler
        self._delegated = None if function is None else DelegatedBackward(function)
        self._is_trial = False
        self._computed = computed
        self._is_split = False
        # 0 at the end means that nothing was trained, which nobody wants silently: see
        # test_gradients_disabled_are_explained
        self._n_roots = 0

    def begin(self, *, is_split: bool, is_trial: bool = False) -> None:
        """Start an attempt.

        Args:
            is_split: whether the batch is.
            is_trial: whether all that it makes is taken back, so that no function of the user's
                gets it.
        """
        self._is_split = is_split
        self._is_trial = is_trial
        self._n_roots = 0
        if self._delegated is not None:
            self._delegated.begin()

    def scaled(self, value: Tensor) -> Tensor:
        """Return a loss, or a weight of one, times the scale of the scaler."""
        if self._scaler is None:
            return value
        scaled: Tensor = self._scaler.scale(value)
        return scaled

    def run(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        own: Iterable[Tensor] = (),
        weightless: Iterable[Tensor] = (),
    ) -> bool:
        """Run backward from those roots that require grad.

        Args:
            roots: tensors of any shape.
            seeds: the gradient of the loss for each root; None for 1.
            own: leaves that the step has made for itself, whose gradients it reads.
            weightless: further roots, which run backward, and give zeros.

        Returns:
            Whether there were any.

        Raises:
            AdaptiveUsageError: the graph has been used up.
        """
        with without_functions():
            # a term may be a constant, such as a penalty that is switched off
            pairs = [(r, s) for r, s in zip(roots, seeds, strict=True) if r.requires_grad]
            empty = [root for root in weightless if root.requires_grad]
            zeros = giving_zeros(empty, [root for root, _ in pairs])
            pairs += [(root, torch.zeros_like(root)) for root in empty]
            if not pairs:
                return False
            self._n_roots += len(pairs)
            # read from the graph before it runs: a leaf that the function made has to be set aside
            # too, or its old gradient would be added to in place
            self.watch(_leaves_but(own, (root for root, _ in pairs)))
        with self._explaining(), without_autocast(root.device for root, _ in pairs), zeros:
            if self._delegated is None or self._is_trial:
                torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])
            else:
                self._delegated.run(pairs)
        return True

    def run_to(self, outputs: Sequence[Tensor], loss: Tensor) -> None:
        """Run a loss backward to leaves that the step has made, and to what the loss trains itself.

        A function of the user's gets the loss for what it trains itself alone: the gradients of the
        outputs come to it with the chunks, and would be scaled twice.

        Raises:
            AdaptiveUsageError: the graph has been used up.
        """
        if self._delegated is None or not loss.requires_grad:
            self.run([self.scaled(loss)], [None], outputs)
            return
        self._n_roots += 1
        trains = bool(_leaves_but(outputs, [loss]))
        with self._explaining(), without_autocast([loss.device]):
            gradients = torch.autograd.grad(
                loss, outputs, retain_graph=trains, allow_unused=True
            )  # fmt: skip
        if trains:
            self.run([loss], [None], outputs)
        for output, gradient in zip(outputs, gradients, strict=True):
            output.grad = gradient

    def check_linear(self) -> None:
        """Make sure that a function of the user's has scaled every part of the step alike.

        Raises:
            AdaptiveUsageError: it has not.
        """
        if self._delegated is not None:
            self._delegated.check_linear()

    def check_ran(self) -> None:
        """Make sure that something required grad.

        Raises:
            AdaptiveUsageError: nothing did.
        """
        if not self._n_roots:
            raise AdaptiveUsageError(
                "No loss of step() requires grad, so there is nothing to run backward. Call it "
                "with gradients enabled, and let the function return what it computed from "
                "parameters that require grad, not a number or a detached tensor."
            )

    def watch(self, leaves: Sequence[Tensor]) -> None:
        """Prepare leaves for a backward pass."""
        new = self._gradients.watch(leaves)
        # those that were known before were told to wait when the split began
        if new and self._is_split:
            self.let_hooks_wait(new)

    def let_hooks_wait(self, leaves: Sequence[Tensor]) -> None:
        """Make sure that no hook of a leaf sees a part of a gradient.

        Raises:
            AdaptiveUsageError: one has a hook that wants to run right after each backward pass.
        """
        with without_functions():
            # such a hook may step an optimizer and drop the gradient, which makes waiting senseless
            _refuse_post_hooks(leaves)
            self._gradients.hold_hooks(leaves)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        # autograd has run through the graphs of other roots by then; the attempt's state is taken
        # back
        except RuntimeError as error:
            if BACKWARD_TWICE not in str(error):
                raise
            raise self._used_up() from error

    def _used_up(self) -> AdaptiveUsageError:
        names = self._computed()
        found = f", such as {', '.join(map(repr, names))}," if names else ""
        return AdaptiveUsageError(
            f"The function of step() uses a tensor{found} that was computed before step() was "
            "called, or it runs backward itself. A graph runs backward once, and each micro-batch "
            "would need it again. Pass the tensor as a part of the batch, or compute it in the "
            "function."
        )


def _leaves_but(own: Iterable[Tensor], roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graphs of ``roots`` that are none of ``own``."""
    made = {id(leaf) for leaf in own}
    return [leaf for leaf in leaves_of(roots) if id(leaf) not in made]


def _refuse_post_hooks(leaves: Sequence[Tensor]) -> None:
    hooked = [leaf for leaf in leaves if post_hooks_of(leaf)]
    if hooked:
        raise AdaptiveUsageError(
            f"{len(hooked)} of the parameters have a hook from register_post_accumulate_grad_hook"
            "(). It would run for each micro-batch, with a part of the gradient. Do its work after "
            "step(), or pass a batch that fits; if the whole batch was tried, its hooks may have "
            "run already."
        )


@contextmanager
def without_autocast(devices: Iterable[torch.device]) -> Iterator[None]:
    """Backward passes use the types of the forward pass, also where step() is inside autocast."""
    # autocast of the CPU counts for nodes on the CPU inside a graph of a device
    kinds = {"cpu", *(device.type for device in devices)}
    enabled = [kind for kind in kinds if _is_autocast(kind)]
    if not enabled:
        yield
        return
    with ExitStack() as off:
        for kind in enabled:
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


def _is_autocast(kind: str) -> bool:
    # not on meta
    available = torch.amp.is_autocast_available(kind)
    return available and torch.is_autocast_enabled(kind)
