"""Gradients of one attempt, and the backward passes that make them.

Invariant: until ``finish`` every ``.grad`` that was there is untouched, so that an attempt that
failed leaves no trace; ``finish`` adds in place, and the objects in ``.grad`` stay the same ones.
What may fail comes before the first is added, so that all are added in the end, or none.

The hooks of a leaf wait until its gradient is whole: each runs once, inside a backward pass, with
the sum of what several passes made; and whatever happens, it is there again afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._registries import gradients_aside
from tenure._torch.autograd import BACKWARD_TWICE, hooks_of, post_hooks_of
from tenure._torch.quiet import without_functions
from tenure.scopes import persist

from .._callables import short_name_of

T = TypeVar("T")
_Hooks = dict[int, Callable[[Tensor], Any]]


class IsolatedGradients:
    """Sets the gradients of leaf tensors aside while an attempt makes new ones.

    Args:
        leaves: those that are known before the attempt; `watch` adds others.
        frozen: tensors that an attempt may let require grad, as for a penalty.
    """

    __slots__ = ("_frozen", "_held", "_hooks", "_late", "_leaves", "_with_old")

    def __init__(self, leaves: Iterable[Tensor], frozen: Iterable[Tensor] = ()) -> None:
        self._leaves, self._frozen = list(leaves), frozen
        self._late: list[Tensor] = []
        self._with_old: set[int] = set()
        # leaves and their old gradients by identity: two leaves may hold the same numbers
        self._held: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._hooks: dict[int, tuple[Tensor, _Hooks]] = {}

    def are_there_before(self) -> bool:
        """Return whether a leaf that is known before the attempt has a gradient now."""
        with without_functions():
            return gradients_aside.get() or any(leaf.grad is not None for leaf in self._leaves)

    def begin(self) -> None:
        """Set aside what is there."""
        self._held, self._with_old = {}, set()
        try:
            self.watch(self._leaves)
        except BaseException:
            # an interrupt; who fails to begin is not asked to undo
            self.undo()
            raise

    def learn(self, leaves: list[Tensor]) -> None:
        """Add leaves that are known from now on, also inside a reentrant checkpoint.

        The next `watch`, before a backward pass of the step, sets their gradients aside.
        """
        self._late += leaves

    def watch(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Set aside the gradients of more leaves, before the first backward pass that has them.

        Returns:
            These leaves, and those that were learned of since.
        """
        held, leaves = self._held, [*leaves]
        if self._late:
            leaves += self._late
            self._leaves += self._late
            self._late = []
        # a mode of the user's would count, and a scope would own, what is only looked at
        with without_functions():
            for leaf in leaves:
                if id(leaf) not in held:
                    prior = leaf.grad
                    held[id(leaf)] = leaf, prior
                    if prior is not None:
                        leaf.grad = None
        return leaves

    def leaves(self) -> list[Tensor]:
        """Return all leaves that are watched."""
        return [leaf for leaf, _ in self._held.values()]

    def new(self) -> list[tuple[Tensor, Tensor]]:
        """Return the leaves that this attempt has given a gradient, and that gradient."""
        with without_functions():
            return [
                (leaf, new) for leaf, _ in self._held.values() if (new := leaf.grad) is not None
            ]

    def has_any(self, leaf: Tensor, *, or_new: bool) -> bool:
        """Return whether a leaf had a gradient before, or has a new one."""
        if id(leaf) not in self._held:
            return False
        with without_functions():
            return self.old(leaf) is not None or (or_new and leaf.grad is not None)

    def old(self, leaf: Tensor) -> Tensor | None:
        """Return the gradient that a leaf had before."""
        return self._held[id(leaf)][1]

    def contains_old(self, leaf: Tensor) -> None:
        """Note that the old gradient of a leaf has been added to its new one."""
        self._with_old.add(id(leaf))

    def hold_hooks(self, leaves: Iterable[Tensor]) -> None:
        """Let the hooks of leaves wait: they get the sum of several backward passes, once.

        Raises:
            AdaptiveUsageError: those of one wait already, so that it got more of them since.
        """
        for leaf in leaves:
            if hooks := hooks_of(leaf):
                if id(leaf) in self._hooks:
                    raise AdaptiveUsageError(
                        "The function of step() registers a hook of a parameter in each call, so "
                        "that there would be one for each micro-batch. No gradient was "
                        "delivered. Register it before step(), which runs it once."
                    )
                self._hooks[id(leaf)] = leaf, dict(hooks)
                # in the same dict: autograd of C++ holds it, and a removable handle, too
                hooks.clear()

    def run_hooks(self) -> None:
        """Put the hooks that wait back, and run them once; they may fail, and nothing is added."""
        if not self._hooks:
            return
        # a leaf that got no gradient has hooks that autograd would not run either
        waiting = [leaf for leaf, _ in self._hooks.values()]
        leaves = [leaf for leaf in waiting if leaf.grad is not None and leaf.requires_grad]
        self._put_back()
        if leaves:
            # a backward pass of its own, because only there a hook may change the gradient, and
            # hooks of several leaves fire together
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            with persist(), torch.no_grad():
                torch.autograd.backward(leaves, gradients)

    def scale(self, factor: Tensor) -> None:
        """Multiply the new gradients.

        Args:
            factor: of no dimension.
        """
        # parameters may stand on several devices: one copy for each, not for each gradient
        factors: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for _, grad in self.new():
                if grad.device not in factors:
                    factors[grad.device] = factor.to(grad.device)
                grad.mul_(factors[grad.device])

    def finish(self) -> None:
        """Add the new gradients to the old ones; what allocates, or may fail, comes first.

        See Note [Retry and undo], rule 3. The caller keeps interrupts out.
        """
        self.run_hooks()
        # of other leaves the new one stands in `.grad` already
        held = [(leaf, prior) for leaf, prior in self._held.values() if prior is not None]
        if held:
            # sums are the user's gradients from now on: without functions no scope owns them
            with without_functions(), torch.no_grad():
                sums = [self._sum_of(leaf, prior) for leaf, prior in held]
                for (leaf, prior), total in zip(held, sums, strict=True):
                    new, leaf.grad = leaf.grad, prior
                    if total is None:
                        if new is not None:
                            prior.add_(new)
                    elif total.layout is prior.layout:
                        prior.data = total
                    else:
                        # a sparse gradient cannot become dense in its own object
                        leaf.grad = total
        self._held = {}

    def undo(self) -> None:
        """Drop the new gradients, and put the old ones back."""
        self._put_back()
        with without_functions():
            for leaf, prior in self._held.values():
                # an attempt that failed early left most of them as they were
                if leaf.grad is not prior:
                    leaf.grad = prior
            for tensor in self._frozen:
                if tensor.requires_grad and tensor.is_leaf:
                    tensor.requires_grad_(False)
                    tensor.grad = None
        self._held = {}

    def _sum_of(self, leaf: Tensor, prior: Tensor) -> Tensor | None:
        """Return the sum, if adding in place would allocate; two dense ones are added later.

        A gradient whose elements share memory can't be added to in place, and one made in inference
        mode counts no versions.

        Source: ``AccumulateGrad::accumulateGrad`` of torch/csrc/autograd/functions/
        accumulate_grad.h.
        """
        new = leaf.grad
        if new is None or id(leaf) in self._with_old:
            return new
        if prior.layout is not torch.strided:
            return new + prior
        shares_elements = 0 in prior.stride() and prior.numel() > 1
        if new.layout is torch.strided and not shares_elements and not prior.is_inference():
            return None
        return prior + new

    def _put_back(self) -> None:
        """Give the leaves their hooks, before those that were added meanwhile."""
        for leaf, hooks in self._hooks.values():
            present: dict[int, Any] = hooks_of(leaf)
            # the order of a dict is the order in which hooks run
            added_meanwhile = dict(present)
            present.clear()
            present.update(hooks | added_meanwhile)
        self._hooks = {}


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graphs of ``roots``, each once; of a root that is a leaf, itself.

    A graph that a node makes only while it runs backward (reentrant checkpoints) is not seen.
    """
    found: dict[int, Tensor] = {}
    _inner_nodes(roots, found)
    return list(found.values())


def _inner_nodes(roots: Iterable[Tensor], leaves: dict[int, Tensor]) -> list[Any]:
    """Return the inner nodes of the graphs of ``roots``, each once.

    Args:
        roots: tensors of any shape.
        leaves: gets the leaves of these graphs by identity.
    """
    waiting: list[Any] = []
    for root in roots:
        if root.grad_fn is not None:
            waiting.append(root.grad_fn)
        elif root.requires_grad:
            leaves[id(root)] = root
    seen: set[Any] = {None, *waiting}
    inner: list[Any] = []
    while waiting:
        node = waiting.pop()
        if below := node.next_functions:
            inner.append(node)
            for each, _ in below:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        # `AccumulateGrad` alone has a `variable` and nothing below it
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
    return inner


Backward = Callable[[Tensor], object]
Pair = tuple[Tensor, Tensor | None]
"""A tensor to run backward from, and the gradient it gets; None for 1."""

# In float16 a scale of 1/3 is off by so much; what is off by more depends on the loss.
_FACTOR_RTOL = 1e-2


def _scalar_of(pairs: Sequence[Pair]) -> Tensor:
    """Return a scalar whose gradient is what the tensors get."""
    tensors, seeds = zip(*pairs, strict=True)
    with torch.enable_grad():
        if len(pairs) == 1 and seeds[0] is None:
            # the user may write into it, and the loss is reported afterwards
            return torch.clone(tensors[0])
        # terms may stand on several devices
        values = [_weighted(tensor, seed).to(tensors[0].device) for tensor, seed in pairs]
        return sum(values[1:], values[0])


def _weighted(tensor: Tensor, seed: Tensor | None) -> Tensor:
    # a scale of 2 ** 16 would be infinite on its way to tensors in float16
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    wide = tensor.float() if is_half else tensor
    product = wide if seed is None else wide * seed.to(wide.dtype).conj()
    return (product.real if product.is_complex() else product).sum()


class Scaler(Protocol):
    """The part of a ``torch.amp.GradScaler`` that `step` uses."""

    def scale(self, outputs: Tensor) -> Any:
        """Return the loss times the scale."""


class SplitBackward:
    """The backward passes of one attempt.

    Args:
        gradients: where they leave what they make.
        scaler: scales losses, or None.
        function: runs them backward in place of autograd, or None.
        computed: names the captured tensors that come of a computation of before.

    Attributes:
        n_roots: the tensors that a pass of this attempt ran from; 0 at the end means that nothing
            was trained, which nobody wants silently.
        is_thrown_away: whether nobody gets the gradients, so that no hook of the user's sees them.
        unhooked: leaves whose gradients come without autograd, and so without hooks, by identity.
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
        self._function = function
        # what the function has multiplied each gradient by
        self._factors: list[Tensor] = []
        self._computed = computed
        self._is_split = self._delegates = self.is_thrown_away = False
        self.n_roots = 0
        self.unhooked: frozenset[int] = frozenset()

    def begin(self, *, is_split: bool, is_trial: bool = False) -> None:
        """Start an attempt.

        Args:
            is_split: whether the batch is.
            is_trial: whether all that it makes is taken back, so that no function of the user's
                gets it.
        """
        self._is_split = is_split
        self._delegates = self._function is not None and not is_trial
        self.n_roots = 0
        self._factors = []

    def needs_gradient_of(self, leaf: Tensor) -> bool:
        """Return whether a leaf has a gradient from before or from a pass of this attempt."""
        # before the first pass they are those of a function that runs backward itself
        return self._gradients.has_any(leaf, or_new=self.n_roots > 0)

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
        own: Sequence[Tensor] = (),
        weightless: Sequence[Tensor] = (),
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
        tensors: list[Tensor] = []
        weights: list[Tensor | None] = []
        zeros: AbstractContextManager[None] = nullcontext()
        with without_functions():
            for root, seed in zip(roots, seeds, strict=True):
                # a term may be a constant, such as a penalty that is switched off
                if root.requires_grad:
                    tensors.append(root)
                    weights.append(seed)
            if weightless and (empty := [root for root in weightless if root.requires_grad]):
                zeros = _giving_zeros(empty, [*tensors])
                tensors += empty
                weights += map(torch.zeros_like, empty)
            if not tensors:
                return False
            if self._is_split and not self.n_roots:
                self._refuse_earlier_gradients()
            self.n_roots += len(tensors)
            # read from the graph before it runs: a leaf that the function made has to be set aside
            # too, or its old gradient would be added to in place
            leaves: dict[int, Tensor] = {}
            _inner_nodes(tensors, leaves)
            for leaf in own:
                leaves.pop(id(leaf), None)
            watched = self._gradients.watch(leaves.values())
        # those of before were told to wait when the split began; the function may have new ones
        if self._is_split or self.is_thrown_away:
            self.let_hooks_wait(watched)
        plain = functools.partial(torch.autograd.backward, tensors, weights)
        pairs = zip(tensors, weights, strict=True)
        with zeros:
            self._in_types_of(
                tensors,
                functools.partial(self._delegate, [*pairs]) if self._delegates else plain,
            )
        return True

    def _refuse_earlier_gradients(self) -> None:
        # zeros are what zero_grad() has left
        if any(bool(each.is_sparse or each.any()) for _, each in self._gradients.new()):
            raise AdaptiveUsageError(
                "The function of step() calls backward(), which step() does. No gradient was "
                "delivered. Return the loss alone. If the function needs a gradient itself, take "
                "it by torch.autograd.grad()."
            )

    def run_to(self, outputs: Sequence[Tensor], loss: Tensor) -> None:
        """Run a loss backward to leaves that the step has made, and to what the loss trains itself.

        A function of the user's gets the loss for what it trains itself alone: the gradients of the
        outputs come to it with the chunks, and would be scaled twice.

        Raises:
            AdaptiveUsageError: the graph has been used up.
        """
        if self._function is None or not loss.requires_grad:
            self.run([self.scaled(loss)], [None], outputs)
            return
        self.n_roots += 1
        trains = not {*map(id, leaves_of([loss]))}.issubset(map(id, outputs))
        gradients = self._in_types_of(
            [loss],
            lambda: torch.autograd.grad(loss, outputs, retain_graph=trains, allow_unused=True),
        )
        if trains:
            self.run([loss], [None], outputs)
        for output, gradient in zip(outputs, gradients, strict=True):
            output.grad = gradient

    def _delegate(self, pairs: Sequence[Pair]) -> None:
        """Let a function of the user's run backward from some tensors at once.

        It gets a scalar whose gradient is what the pass has to leave, so that what it scales, it
        scales once, however many chunks and passes there are.

        Raises:
            AdaptiveUsageError: the function ran nothing.
        """
        assert self._function is not None
        scalar = _scalar_of(pairs)
        seen: list[Tensor] = []
        scalar.register_hook(seen.append)
        # what it keeps, such as the scale of a scaler that begins now, outlives an attempt that
        # fails
        with persist():
            self._function(scalar)
        if not seen:
            raise AdaptiveUsageError(
                f"backward= of step(), {short_name_of(self._function)!r}, ran no backward pass "
                "from the loss that it got, so that gradients would be missing. Let it call "
                "backward() on its argument, or on a multiple of that."
            )
        self._factors.append(sum(seen[1:], seen[0]))

    def check_linear(self) -> None:
        """Make sure that a function of the user's has scaled every part of the step alike.

        The host waits for the device here.

        Raises:
            AdaptiveUsageError: it has not.
        """
        factors = [float(factor.detach()) for factor in self._factors]
        # nan where a scale is no number; what comes of that is the user's to see
        if factors and max(factors) - min(factors) > _FACTOR_RTOL * max(map(abs, factors)):
            raise AdaptiveUsageError(
                f"backward= of step(), {short_name_of(self._function)!r}, multiplied the gradients "
                f"of one micro-batch by {min(factors):g} and those of another by "
                f"{max(factors):g}. A step can be split only if all get the same factor. Nothing "
                "was changed. Do what depends on the loss in the function of step(), or in loss= "
                "or then=."
            )

    def let_hooks_wait(self, leaves: Iterable[Tensor]) -> None:
        """Make sure that no hook of a leaf sees a part of a gradient.

        Raises:
            AdaptiveUsageError: one has a hook that wants to run right after each backward pass, or
                gets a hook in each call of the function.
        """
        with without_functions():
            n_hooked, waiting = 0, []
            for leaf in leaves:
                # those of a leaf that is frozen don't run
                if leaf.requires_grad:
                    n_hooked += bool(post_hooks_of(leaf))
                    if id(leaf) not in self.unhooked:
                        waiting.append(leaf)
            # such a hook may step an optimizer and drop the gradient, which makes waiting senseless
            if n_hooked:
                raise AdaptiveUsageError(
                    f"{n_hooked} of the parameters have a hook from "
                    "register_post_accumulate_grad_hook(). It would run for each micro-batch, with "
                    "a part of the gradient. Do its work after step(), or pass a batch that fits; "
                    "if the whole batch was tried, its hooks may have run already."
                )
            self._gradients.hold_hooks(waiting)

    def _in_types_of(self, roots: Sequence[Tensor], backward: Callable[[], T]) -> T:
        """Run a backward pass in the types of its forward pass, and return what it returns.

        Raises:
            AdaptiveUsageError: the graph has been used up.
        """
        # autocast of the CPU counts for nodes on the CPU inside a graph of a device
        kinds = {"cpu"}
        with without_functions():
            for root in roots:
                kinds.add(root.device.type)
        try:
            with ExitStack() as off:
                for kind in kinds:
                    # not on meta
                    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                        off.enter_context(torch.autocast(kind, enabled=False))
                return backward()
        # autograd has run through the graphs of other roots by then; the attempt's state is taken
        # back
        except RuntimeError as error:
            if BACKWARD_TWICE not in str(error):
                raise
            names = self._computed()
            found = f", such as {', '.join(map(repr, names))}," if names else ""
            raise AdaptiveUsageError(
                f"The function of step() uses a tensor{found} that was computed before step() was "
                "called, or it runs backward itself, or once= uses what it computes. A graph runs "
                "backward once, and each micro-batch or attempt would need it again. Compute the "
                "tensor in the function, or detach() it."
            ) from error


_Gradients = tuple[Tensor | None, ...]


@contextmanager
def _giving_zeros(weightless: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Return a block in whose backward passes some roots give zeros to all that they come of.

    Args:
        weightless: these roots.
        others: further roots of the same passes; what they come of, too, gets their gradients.
    """
    shared = set(_inner_nodes(others, {}))
    # to what is shared they add zeros
    own = [node for node in _inner_nodes(weightless, {}) if node not in shared]
    with ExitStack() as hooks:
        for node in own:
            hooks.enter_context(node.register_hook(_zeros))
        yield


def _zeros(gradients: _Gradients, _: _Gradients) -> _Gradients:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
