"""What the corpus is made of: architectures, and for each size of one the step that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""What makes an optimizer for parameters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that has not run yet.

    Attributes:
        model: whose parameters are trained; ``fn`` reaches it.
        fn: called with ``args``; gives the loss, or a tensor that needs no gradient where it has
            run its backward itself.
        args: the batch, in the structure that ``fn`` wants.
    """

    model: nn.Module
    fn: Callable[..., Tensor]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Something to train, at three sizes.

    Attributes:
        name: unique in the corpus.
        family: what it is counted under.
        sizes: of the batch.
        build: gives the step at a size; the weights are random.
        make_optimizer: AdamW unless the row is about another.
    """

    name: str
    family: str
    sizes: tuple[int, ...]
    build: Callable[[int], Step]
    make_optimizer: MakeOptimizer = torch.optim.AdamW


def step_on(model: nn.Module, loss: Callable[[Any], Tensor], *args: Any) -> Step:
    """The step that takes ``loss`` of what the model makes of its arguments."""

    def fn(*inputs: Any) -> Tensor:
        return loss(model(*inputs))

    return Step(model, fn, args)


def mean_square(output: Tensor) -> Tensor:
    """A loss for who only wants a gradient."""
    return output.square().mean()


def images(batch_size: int, side: int = 64) -> Tensor:
    """Noise as images of three channels."""
    return torch.randn(batch_size, 3, side, side)


def with_target(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Step:
    """The step that takes ``loss`` of what the model makes of ``x``, and of ``y``."""
    return Step(model, lambda x, y: loss(model(x), y), (x, y))


def classes(model: nn.Module, x: Tensor) -> Step:
    """The step of a classifier with ten classes."""
    return with_target(model, F.cross_entropy, x, torch.randint(10, (len(x),)))


def next_token(model: nn.Module, batch_size: int, n_words: int, n_tokens: int) -> Step:
    """The step of a language model over words at random."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.randint(n_words, (batch_size, n_tokens))
    return with_target(model, loss, tokens, tokens.roll(-1, 1))
