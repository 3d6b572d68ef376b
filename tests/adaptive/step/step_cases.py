"""Losses and models of a training step, written twice: as plain PyTorch, and for `step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import SplitMismatchError, step

N_CLASSES = 5
IGNORED = -100


@dataclass(frozen=True)
class LossCase:
    """A loss of (logits, y) over the batch, and how it is said to `step`.

    Attributes:
        plain: the loss of the whole batch.
        fn: what the function of `step` returns for some samples.
        options: the other arguments of `step`.
    """

    plain: Callable[[Any, Any], Any]
    fn: Callable[[Any, Any], Any]
    options: dict[str, Any] = field(default_factory=dict)


def ce(o, y):
    return F.cross_entropy(o, y, ignore_index=IGNORED)


def ce_sum(o, y):
    return F.cross_entropy(o, y, ignore_index=IGNORED, reduction="sum")


def n_valid(batch):
    return (batch["y"] != IGNORED).sum()


def contrastive(o):
    o = F.normalize(o, dim=1)
    return F.cross_entropy(o @ o.T * 5, torch.arange(len(o)))


def _two_counts(o, y):
    return {"ce": (ce_sum(o, y), (y != IGNORED).sum()), "size": (o.square().sum(), o.numel())}


def _mixed(o, y):
    return {"ce": (ce_sum(o, y), int((y != IGNORED).sum())), "size": o.square().mean()}


LOSSES = {
    "mean": LossCase(lambda o, y: o.square().mean(), lambda o, y: o.square().mean()),
    "sum": LossCase(lambda o, y: o.exp().sum(), lambda o, y: o.exp().sum(), {"loss": "sum"}),
    "ignored labels": LossCase(ce, ce, {"weight": n_valid}),
    "sum and count": LossCase(ce, lambda o, y: (ce_sum(o, y), (y != IGNORED).sum())),
    "terms with one weight": LossCase(
        lambda o, y: o.square().mean() + 0.3 * o.abs().mean(),
        lambda o, y: {"square": o.square().mean(), "abs": 0.3 * o.abs().mean()},
    ),
    "terms with a count each": LossCase(lambda o, y: ce(o, y) + o.square().mean(), _two_counts),
    "a term with a count and one without": LossCase(
        lambda o, y: ce(o, y) + o.square().mean(), _mixed
    ),
    "log of a sum": LossCase(
        lambda o, y: o.square().sum().log(),
        lambda o, y: o.square().sum(),
        {"loss": "sum", "then": torch.log},
    ),
    "perplexity": LossCase(
        lambda o, y: ce(o, y).exp(),
        lambda o, y: (ce_sum(o, y), (y != IGNORED).sum()),
        {"then": torch.exp},
    ),
    "a ratio of terms": LossCase(
        lambda o, y: ce(o, y) / (1 + o.square().mean()),
        _two_counts,
        {"then": lambda terms: terms["ce"] / (1 + terms["size"])},
    ),
    "contrastive": LossCase(lambda o, y: contrastive(o), lambda o, y: o, {"loss": contrastive}),
    "outputs, some without gradient, some unused": LossCase(
        lambda o, y: F.mse_loss(o, (y % 5).double()[:, None].expand_as(o)) + o.std(),
        lambda o, y: (o, (y % 5).double()[:, None].expand_as(o), o * 2),
        {"loss": lambda out: F.mse_loss(out[0], out[1]) + out[0].std()},
    ),
    "outputs with their labels": LossCase(
        lambda o, y: ce(o, y) + o.std(),
        lambda o, y: {"o": o, "y": y, "scale": 1.0},
        {"loss": lambda out: ce(out["o"], out["y"]) + out["scale"] * out["o"].std()},
    ),
}


class MeanOf(nn.Module):
    """The mean over the sequence of what a module returns, then logits."""

    def __init__(self, inner, width, embed):
        super().__init__()
        self.embed, self.inner, self.head = embed, inner, nn.Linear(width, N_CLASSES)

    def forward(self, x):
        return self.head(self.inner(self.embed(x)).mean(1))


def _mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, N_CLASSES))


def _frozen_bn():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, N_CLASSES))
    net[1].running_mean.normal_()
    net[1].eval()
    return net


def _transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return MeanOf(encoder, 8, nn.Embedding(11, 8))


def _sparse():
    return MeanOf(nn.Identity(), 8, nn.Embedding(11, 8, sparse=True))


def vectors(n):
    return torch.randn(n, 6, dtype=torch.float64)


def tokens(n):
    return torch.randint(11, (n, 4))


MODELS = {
    "MLP": (_mlp, vectors),
    "frozen BatchNorm": (_frozen_bn, vectors),
    "transformer": (_transformer, tokens),
    "sparse embedding": (_sparse, tokens),
}


def made(model, n_samples, seed):
    """A model in float64, and a batch for it; about every fourth label is ignored."""
    torch.manual_seed(seed)
    make, inputs = MODELS[model]
    net = make().double()
    y = torch.randint(N_CLASSES, (n_samples,))
    y[torch.rand(n_samples) < 0.25] = IGNORED
    y[0] = 1
    return net, {"x": inputs(n_samples), "y": y}


def gradients(module):
    """Copies of the gradients by name; a gradient that is not there is left out."""
    return {
        name: p.grad.to_dense().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def worst_error(got, wanted):
    """The largest difference, relative to the largest gradient of the parameter."""
    assert got.keys() == wanted.keys()
    scale = max(float(w.abs().max()) for w in wanted.values())
    return max(
        float((got[name] - w).abs().max()) / max(float(w.abs().max()), 1e-3 * scale, 1e-300)
        for name, w in wanted.items()
    )


def squares(net):
    """The mean of the squares of what a module gives."""
    return lambda b: net(b).square().mean()


def wanted_of(net, loss):
    """The gradients of a plain step, which are gone afterwards."""
    loss.backward()
    found = gradients(net)
    net.zero_grad()
    return found


def compare(net, whole, fn, batch, scale=1, **options):
    """Run a step whose whole has that loss: it has its value, its device and its gradients.

    The gradients are multiplied by the scale.
    """
    value = whole.detach().clone()
    wanted = wanted_of(net, whole * scale)
    result = step(fn, batch, **options)
    assert worst_error(gradients(net), wanted) <= 1e-10
    torch.testing.assert_close(result.loss, value, rtol=1e-10, atol=1e-10)
    net.zero_grad()
    return result


def refused(fn, batch, *, maximum=4, **options):
    """The error of a split that would change the result."""
    with pytest.raises(SplitMismatchError) as caught:
        step(fn, batch, maximum=maximum, **options)
    return caught.value


def small_net():
    """A model in float64 that takes 4 numbers and gives 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(n=9):
    """What it takes."""
    return torch.randn(n, 4, dtype=torch.float64)


class _Holder:
    def __init__(self, net):
        self.net = net


def unseen(net):
    """Run a module that no search finds, because no code names the attribute that holds it."""
    holder = _Holder(net)
    return lambda b: getattr(holder, "n" + "et")(b)


class OwnBatchNorm(nn.Module):
    """Normalizes by itself: an operation writes its buffers without raising their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(self.linear(x), self.mean, self.var, training=True)
