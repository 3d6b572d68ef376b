"""The tensors of a batch while it is split; those that require grad are cut off their graph.

Invariant: whatever the split and however often it is tried, the graph that a tensor of the batch
came of is run backward once, with the whole gradient; and nobody gets unwarned, in another attempt
or pass, what was written into the batch by the one before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning
from tenure._text import describe_tensor
from tenure._torch.compiler import mark_dynamic, marked_dynamic
from tenure._torch.writes import version_of

from .._gradients import leaves_of
from ._sample_tree import Leaf, SampleTree


class CutInputs:
    """The chunks of a batch, and the gradients that come back to it.

    Args:
        tree: the batch.
        whole: the batch as the user passed it.

    Attributes:
        expects_writes: whether to warn of nothing: it was done, or the batch is a copy for one run.
        length: the samples that the function was given last.
    """

    def __init__(self, tree: SampleTree, whole: Any) -> None:
        self._tree = tree
        self._whole = whole
        self._cuts = [
            _CutTensor(leaf)
            for leaf in tree.leaves
            if isinstance(leaf.value, Tensor) and leaf.value.requires_grad
        ]
        # keys may look the same
        self._by_leaf = {id(cut.leaf): cut for cut in self._cuts}
        tensors = (leaf.value for leaf in tree.leaves if isinstance(leaf.value, Tensor))
        # versions count writes, so that nothing has to be copied to notice one
        self._versions = [(t, version_of(t)) for t in tensors]
        self._frozen = [
            each
            for each, _ in self._versions
            if not each.requires_grad and each.is_floating_point()
        ]
        self._is_used_up = False
        self.expects_writes = False
        self.length = tree.n_samples()

    @property
    def is_written(self) -> bool:
        """Whether the batch is no longer what it was."""
        return any(version_of(tensor) != version for tensor, version in self._versions)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients when these are delivered."""
        return leaves_of(cut.leaf.value for cut in self._cuts)

    def begin(self) -> None:
        """Forget the gradients of an attempt before.

        Raises:
            AdaptiveUsageError: that one ran the graph of the batch backward, and failed after it.
        """
        # smaller micro-batches would not bring the graph back
        if self._is_used_up:
            raise used_up_graph_error()
        self.run_again()
        for cut in self._cuts:
            cut.clear()

    def undo(self) -> None:
        """Turn ``requires_grad`` off where a failed attempt turned it on, as for a penalty."""
        for tensor in self._frozen:
            if tensor.requires_grad and tensor.is_leaf:
                tensor.requires_grad_(False)
                tensor.grad = None

    def finish(self) -> None:
        """Keep what the attempt has set."""

    def refuse_ambiguous(self) -> None:
        """Make sure that it is clear what a sample is."""
        self._tree.refuse_ambiguous()

    def run_again(self) -> None:
        """Warn, once, if the batch is no longer what the function was given the last time."""
        written = [t for t, version in self._versions if version_of(t) != version]
        if written and not self.expects_writes:
            # once: a warning for each chunk tells nothing new
            self.expects_writes = True
            warn_user(
                "step() runs its function again, which has written into "
                f"{describe_tensor(written[0])} of the batch. Where writing twice is not the same "
                "as once, as with x.div_(255), the gradients are wrong: write into a copy, as in "
                "x = x / 255.",
                AdaptiveUsageWarning,
            )

    def whole(self) -> Any:
        """Return the batch itself; a container like it, if something in it requires grad."""
        self.length = self._tree.n_samples()
        # the plain step, to the bit: see test_a_batch_that_fits_is_the_plain_step_to_the_bit
        if not self._cuts:
            return self._whole
        return self._tree.with_leaves([self._piece(leaf, None) for leaf in self._tree.leaves])

    def expecting_other_sizes(self) -> AbstractContextManager[None]:
        """Return a block in which compiled code gets the batch as one of several sizes."""
        return marked_dynamic(
            (leaf.value, leaf.dim)
            for leaf in self._tree.leaves
            if isinstance(leaf.value, Tensor) and isinstance(leaf.dim, int)
        )

    def chunk(self, start: int, length: int) -> Any:
        """Return a container like the batch, of views of some of its samples."""
        where = (start, length)
        self.length = length
        return self._tree.with_leaves([self._piece(leaf, where) for leaf in self._tree.leaves])

    def collect(self) -> None:
        """Take the gradients that the chunks got since; called after each backward pass."""
        for cut in self._cuts:
            cut.collect()

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients.

        Args:
            factor: of no dimension.
        """
        for cut in self._cuts:
            # on its own device: parts of a batch may stand on several
            if cut.gradient is not None:
                with torch.no_grad():
                    cut.gradient.mul_(factor.to(cut.gradient.device))

    def deliver(self) -> None:
        """Run what the batch came of backward; it can't be run a second time."""
        ready = [(cut.leaf.value, cut.gradient) for cut in self._cuts if cut.gradient is not None]
        if ready:
            # all at once: two tensors of the batch may come of one graph, which runs backward only
            # once
            tensors, gradients = zip(*ready, strict=True)
            torch.autograd.backward(tensors, gradients)
            self._is_used_up = self.has_graph

    @property
    def get_gradients(self) -> bool:
        """Whether something in the batch requires grad."""
        return bool(self._cuts)

    @property
    def has_graph(self) -> bool:
        """Whether something in the batch is the result of a computation that autograd recorded."""
        return any(cut.leaf.value.grad_fn is not None for cut in self._cuts)

    def _piece(self, leaf: Leaf, where: tuple[int, int] | None) -> Any:
        cut = self._by_leaf.get(id(leaf))
        if cut is not None:
            piece = cut.piece(where)
        elif where is None:
            return leaf.value
        else:
            piece = leaf.part(*where)
        # else compiled code would be compiled again for each size that is tried
        if isinstance(piece, Tensor) and isinstance(leaf.dim, int):
            mark_dynamic(piece, leaf.dim)
        return piece


def used_up_graph_error() -> AdaptiveUsageError:
    """Return the error for a step that failed when its batch's graph had run backward."""
    return AdaptiveUsageError(
        "Memory ran out after the step, in the backward pass of what the batch was computed from, "
        "or in a hook that got the whole gradient. That graph is used up, so it can't be tried "
        "again, and smaller micro-batches would not make it smaller. All gradients are as before. "
        "Compute that part inside the function of step(), or detach() it."
    )


class _CutTensor:
    """One tensor of the batch: pieces of it that are leaves, and the gradient they add up to."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.clear()

    def clear(self) -> None:
        self.gradient: Tensor | None = None
        self._pieces: list[tuple[Tensor, tuple[int, int] | None]] = []

    def piece(self, where: tuple[int, int] | None) -> Tensor:
        # narrowed behind the cut, so that the piece is a leaf and its gradient has its own shape
        value: Tensor = self.leaf.value.detach()
        if where is not None and isinstance(self.leaf.dim, int):
            value = value.narrow(self.leaf.dim, *where)
        else:
            where = None
        piece = value.requires_grad_()
        self._pieces.append((piece, where))
        return piece

    def collect(self) -> None:
        for piece, where in self._pieces:
            if piece.grad is not None:
                self._add(piece.grad, where)
                # it is no gradient of the user's, and nobody else may scale it
                piece.grad = None
        self._pieces = []

    def _add(self, gradient: Tensor, where: tuple[int, int] | None) -> None:
        # nothing to add to, so that the gradient itself can be taken, without a copy
        if where is None and self.gradient is None:
            self.gradient = gradient
            return
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.leaf.value)
        with torch.no_grad():
            if where is None:
                self.gradient.add_(gradient)
            else:
                assert isinstance(self.leaf.dim, int)
                self.gradient.narrow(self.leaf.dim, *where).add_(gradient)
