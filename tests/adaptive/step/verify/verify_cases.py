"""Training steps that a split changes, and others that it leaves as they are, by name.

Each is made of a seed alone: a function for `step`, a batch, and the other arguments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

N, D, C = 24, 6, 5
Case = tuple[Callable[[Any], Any], Any, dict[str, Any]]

WRONG: dict[str, Callable[[], Case]] = {}
RIGHT: dict[str, Callable[[], Case]] = {}


def net(out=C, *middle):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, out))


def batch():
    """Vectors, labels of which some are ignored, targets, weights, masks, and a group for each."""
    y = torch.randint(C, (N,))
    ignored = y.clone()
    ignored[torch.arange(N) % 3 == 1] = -100
    return {
        "x": torch.randn(N, D),
        "y": y,
        "ignored": ignored,
        "t": torch.randn(N, C),
        "binary": (torch.rand(N, C) > 0.7).float(),
        "w": torch.rand(N) + 0.1,
        "mask": torch.rand(N) > 0.4,
        "sign": torch.randint(2, (N,)) * 2.0 - 1,
        "old": torch.randn(N),
        "advantage": torch.randn(N),
    }


def _add(table, name, loss, options, model):
    def make():
        torch.manual_seed(0)
        model_made = model()
        data = batch()

        def fn(b):
            return loss(model_made, b)

        return fn, data, {"model": model_made, **options}

    assert name not in table
    table[name] = make


def wrong(name, fn, model=net, /, **options):
    _add(WRONG, name, fn, options, model)


def right(name, fn, model=net, /, **options):
    _add(RIGHT, name, fn, options, model)


# --- wrong: what the mean divides by

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])


def out(m, b):
    return m(b["x"])


wrong("ignored labels", lambda m, b: F.cross_entropy(out(m, b), b["ignored"]))
wrong("class weights", lambda m, b: F.cross_entropy(out(m, b), b["y"], CLASS_WEIGHTS))
wrong("ignore_index=0", lambda m, b: F.cross_entropy(out(m, b), b["y"], ignore_index=0))
wrong("nll with weights", lambda m, b: F.nll_loss(out(m, b).log_softmax(1), b["y"], CLASS_WEIGHTS))
wrong(
    "class weights with smoothing",
    lambda m, b: F.cross_entropy(out(m, b), b["y"], CLASS_WEIGHTS, label_smoothing=0.1),
)
wrong("mean over a mask", lambda m, b: out(m, b)[b["mask"]].square().mean())
wrong(
    "masked sum over the mask",
    lambda m, b: (out(m, b).square().mean(1) * b["mask"]).sum() / b["mask"].sum(),
)
wrong("weighted mean", lambda m, b: (out(m, b).square().mean(1) * b["w"]).sum() / b["w"].sum())
wrong("only positives", lambda m, b: F.relu(out(m, b))[out(m, b) > 0].mean())
wrong(
    "pos_weight by counts",
    lambda m, b: F.binary_cross_entropy_with_logits(
        out(m, b), b["binary"], pos_weight=(1 - b["binary"]).sum() / b["binary"].sum().clamp(min=1)
    ),
)
wrong(
    "one class of many", lambda m, b: F.cross_entropy(out(m, b)[b["y"] != 2], b["y"][b["y"] != 2])
)
wrong(
    "focal by positives",
    lambda m, b: (
        ((1 - torch.sigmoid(out(m, b))) ** 2 * b["binary"]).sum() / b["binary"].sum().clamp(min=1)
    ),
)
wrong(
    "balanced by counts",
    lambda m, b: F.cross_entropy(
        out(m, b), b["y"], 1 / torch.bincount(b["y"], minlength=C).clamp(min=1).float()
    ),
)
wrong(
    "a mean of two groups",
    lambda m, b: out(m, b)[b["sign"] > 0].square().mean() + out(m, b)[b["sign"] < 0].abs().mean(),
)
wrong("nanmean", lambda m, b: (out(m, b).sum(1) / b["mask"]).where(b["mask"], torch.nan).nanmean())
wrong(
    "a criterion with weights", lambda m, b: nn.CrossEntropyLoss(CLASS_WEIGHTS)(out(m, b), b["y"])
)

# --- wrong: declared as another reduction

wrong("a sum", lambda m, b: out(m, b).square().sum())
wrong("a sum of cross entropies", lambda m, b: F.cross_entropy(out(m, b), b["y"], reduction="sum"))
wrong("a mean declared as a sum", lambda m, b: out(m, b).square().mean(), loss="sum")
wrong("a mean times the length", lambda m, b: out(m, b).square().mean() * len(b["x"]))
wrong("a sum over a constant", lambda m, b: out(m, b).square().sum() / 100)
wrong(
    "the penalty in a sum",
    lambda m, b: out(m, b).square().sum() + m[0].weight.square().sum(),
    loss="sum",
)
wrong("L1 in a sum", lambda m, b: out(m, b).abs().sum() + m[0].weight.abs().sum(), loss="sum")
wrong("max norm in a sum", lambda m, b: out(m, b).exp().sum() + m[2].weight.norm(), loss="sum")
wrong(
    "batchmean declared as a sum",
    lambda m, b: F.kl_div(out(m, b).log_softmax(1), b["t"].softmax(1), reduction="batchmean"),
    loss="sum",
)
wrong(
    "a weight that is none", lambda m, b: out(m, b).square().mean(), weight=lambda b: b["w"].sum()
)
wrong(
    "the count of another label",
    lambda m, b: F.cross_entropy(out(m, b), b["ignored"]),
    weight=lambda b: (b["ignored"] != 0).sum(),
)
wrong(
    "a pair with a wrong count",
    lambda m, b: (
        F.cross_entropy(out(m, b), b["ignored"], reduction="mean"),
        (b["ignored"] >= 0).sum(),
    ),
)
wrong(
    "a pair of a mean", lambda m, b: (out(m, b).square().mean() * b["w"].sum(), b["w"].sum() ** 2)
)
wrong(
    "a dict with one weight for two",
    lambda m, b: {
        "ce": F.cross_entropy(out(m, b), b["ignored"]),
        "size": out(m, b).square().mean(),
    },
)
wrong(
    "a dict with the weight of one term",
    lambda m, b: {
        "ce": F.cross_entropy(out(m, b), b["ignored"]),
        "size": out(m, b).square().mean(),
    },
    weight=lambda b: (b["ignored"] >= 0).sum(),
)

# --- wrong: not linear in the mean

wrong("RMSE", lambda m, b: F.mse_loss(out(m, b), b["t"]).sqrt())
wrong("log of a mean", lambda m, b: out(m, b).square().mean().log())
wrong("log of a sum", lambda m, b: out(m, b).exp().sum().log(), loss="sum")
wrong("exp of a mean", lambda m, b: F.cross_entropy(out(m, b), b["y"]).exp())
wrong("a norm", lambda m, b: out(m, b).norm())
wrong("norm of the mean", lambda m, b: out(m, b).mean(0).norm())
wrong("a maximum", lambda m, b: out(m, b).square().max())
wrong("log-sum-exp over samples", lambda m, b: out(m, b).logsumexp(0).mean())
wrong("a squared mean", lambda m, b: out(m, b).mean().square())
wrong("ratio of means", lambda m, b: out(m, b).square().mean() / (1 + out(m, b).abs().mean()))
wrong("a median", lambda m, b: out(m, b).square().mean(1).median())
wrong("quantile", lambda m, b: out(m, b).square().mean(1).quantile(0.9))
wrong("variance", lambda m, b: out(m, b).var(0).sum())
wrong("standard deviation", lambda m, b: out(m, b).std())
wrong(
    "entropy of the mean",
    lambda m, b: -(out(m, b).softmax(1).mean(0) * out(m, b).softmax(1).mean(0).log()).sum(),
)
wrong("R squared", lambda m, b: F.mse_loss(out(m, b), b["t"]) / b["t"].var())
wrong("Sharpe ratio", lambda m, b: -out(m, b).mean() / out(m, b).std())
wrong("huber of the mean", lambda m, b: F.huber_loss(out(m, b).mean(0), b["t"].mean(0)))
wrong("a clamp of the mean", lambda m, b: out(m, b).square().mean(1).sum().clamp(max=3.0))

# --- wrong: overlaps


def dice(o, t):
    p = o.sigmoid()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


wrong("dice", lambda m, b: dice(out(m, b), b["binary"]))
wrong(
    "jaccard",
    lambda m, b: (
        1
        - (out(m, b).sigmoid() * b["binary"]).sum()
        / (out(m, b).sigmoid() + b["binary"] - out(m, b).sigmoid() * b["binary"]).sum()
    ),
)
wrong(
    "tversky",
    lambda m, b: (
        1
        - (out(m, b).sigmoid() * b["binary"]).sum()
        / ((out(m, b).sigmoid() * b["binary"]).sum() + 0.3 * out(m, b).sigmoid().sum())
    ),
)
wrong(
    "dice per class",
    lambda m, b: (
        1
        - (
            2
            * (out(m, b).sigmoid() * b["binary"]).sum(0)
            / (out(m, b).sigmoid().sum(0) + b["binary"].sum(0) + 1)
        ).mean()
    ),
)
wrong(
    "dice and cross entropy",
    lambda m, b: dice(out(m, b), b["binary"]) + F.cross_entropy(out(m, b), b["y"]),
)
wrong(
    "soft F1",
    lambda m, b: (
        1
        - 2 * (out(m, b).sigmoid() * b["binary"]).sum() / (out(m, b).sigmoid() + b["binary"]).sum()
    ),
)

# --- wrong: samples against samples


def unit(o):
    return F.normalize(o, dim=1)


def info_nce(a, b, tau=0.2):
    return F.cross_entropy(a @ b.T / tau, torch.arange(len(a)))


def simclr(o):
    z = unit(torch.cat([o, o.roll(1, 1)]))
    n = len(o)
    sim = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(sim, torch.arange(2 * n).roll(n))


def batch_hard(o, y):
    d = torch.cdist(o, o)
    same = y[:, None] == y
    return F.relu((d * same).amax(1) - (d + 1e3 * same).amin(1) + 0.5).mean()


def supcon(o, y):
    z = unit(o)
    logits = (z @ z.T / 0.3).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    same = (y[:, None] == y).float().fill_diagonal_(0)
    return -((logits.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def barlow(o):
    a = (o - o.mean(0)) / o.std(0)
    return ((a.T @ a / len(o)) - torch.eye(o.shape[1])).square().sum()


def ranking(o, t):
    gap, wanted = o[:, None] - o, t[:, None] - t
    return F.relu(1 - gap * wanted.sign()).mean()


wrong("InfoNCE", lambda m, b: info_nce(unit(out(m, b)), unit(b["t"])))
wrong(
    "CLIP",
    lambda m, b: (
        (info_nce(unit(out(m, b)), unit(b["t"])) + info_nce(unit(b["t"]), unit(out(m, b)))) / 2
    ),
)
wrong("SimCLR", lambda m, b: simclr(out(m, b)))
wrong("batch-hard triplet", lambda m, b: batch_hard(out(m, b), b["y"]))
wrong("supervised contrastive", lambda m, b: supcon(out(m, b), b["y"]))
wrong("Barlow twins", lambda m, b: barlow(out(m, b)))
wrong("VICReg variance", lambda m, b: F.relu(1 - (out(m, b).var(0) + 1e-4).sqrt()).mean())
wrong("pairwise ranking", lambda m, b: ranking(out(m, b)[:, 0], b["old"]))
wrong(
    "listwise ranking", lambda m, b: -(b["old"].softmax(0) * out(m, b)[:, 0].log_softmax(0)).sum()
)
wrong("Cox", lambda m, b: -(out(m, b)[:, 0] - out(m, b)[:, 0].logcumsumexp(0)).mean())
wrong(
    "MMD",
    lambda m, b: (
        torch.cdist(out(m, b), out(m, b)).mean() - 2 * torch.cdist(out(m, b), b["t"]).mean()
    ),
)
wrong("CORAL", lambda m, b: (out(m, b).T.cov() - b["t"].T.cov()).square().sum())
wrong("pairwise distances", lambda m, b: torch.pdist(out(m, b)).mean())
wrong("uniformity", lambda m, b: torch.pdist(unit(out(m, b))).square().mul(-2).exp().mean().log())
wrong("gram matrix", lambda m, b: (out(m, b).T @ out(m, b) / len(b["x"])).square().mean())
wrong("centre loss of the batch", lambda m, b: (out(m, b) - out(m, b).mean(0)).square().mean())
wrong("correlation", lambda m, b: -torch.corrcoef(torch.stack([out(m, b)[:, 0], b["old"]]))[0, 1])
wrong(
    "semi-hard with roll",
    lambda m, b: F.triplet_margin_loss(out(m, b), b["t"], out(m, b).roll(1, 0)),
)
wrong("neighbours in time", lambda m, b: (out(m, b)[1:] - out(m, b)[:-1]).square().mean())
wrong(
    "distillation over samples",
    lambda m, b: F.kl_div(out(m, b).log_softmax(0), b["t"].softmax(0), reduction="batchmean"),
)
wrong(
    "sinkhorn",
    lambda m, b: (
        torch.cdist(out(m, b), b["t"])
        * torch.cdist(out(m, b), b["t"]).neg().exp().softmax(0).softmax(1)
    ).sum(),
)

# --- wrong: samples that are chosen among all

wrong(
    "OHEM with a fixed number",
    lambda m, b: F.cross_entropy(out(m, b), b["y"], reduction="none").topk(3).values.mean(),
)
wrong(
    "OHEM with a share",
    lambda m, b: (
        F.cross_entropy(out(m, b), b["y"], reduction="none")
        .topk(max(1, len(b["y"]) // 3))
        .values.mean()
    ),
)
wrong(
    "above the mean",
    lambda m, b: F.relu(
        out(m, b).square().mean(1) - out(m, b).square().mean(1).mean().detach()
    ).mean(),
)
wrong("trimmed mean", lambda m, b: out(m, b).square().mean(1).sort().values[1:-1].mean())
wrong(
    "CVaR",
    lambda m, b: (
        out(m, b)
        .square()
        .mean(1)[out(m, b).square().mean(1) >= out(m, b).square().mean(1).median()]
        .mean()
    ),
)

# --- wrong: inside of the function

wrong(
    "functional batch norm",
    lambda m, b: F.batch_norm(out(m, b), None, None, training=True).mul(b["t"]).mean(),
)
wrong("h minus its mean", lambda m, b: (m[0](b["x"]) - m[0](b["x"]).mean(0)).tanh().square().mean())
wrong("flipped", lambda m, b: (out(m, b) * out(m, b).flip(0)).mean())
wrong("shifted by one sample", lambda m, b: (out(m, b) * out(m, b).roll(1, 0)).mean())
wrong(
    "attention over samples",
    lambda m, b: F.scaled_dot_product_attention(*[out(m, b)[None]] * 3).square().mean(),
)
wrong("cumsum over samples", lambda m, b: out(m, b).cumsum(0).square().mean())
wrong("softmax over samples", lambda m, b: (out(m, b).softmax(0) * b["t"]).mean())
wrong("the first sample is special", lambda m, b: (out(m, b) - out(m, b)[:1]).square().mean())
wrong(
    "whitened advantages",
    lambda m, b: (
        -(out(m, b)[:, 0] * (b["advantage"] - b["advantage"].mean()) / b["advantage"].std()).mean()
    ),
)


def ppo(m, b):
    advantage = (b["advantage"] - b["advantage"].mean()) / b["advantage"].std()
    log = out(m, b).log_softmax(1).gather(1, b["y"][:, None])[:, 0]
    return -(torch.exp(log - log.detach()) * advantage).mean()


wrong("PPO in its first epoch", ppo)
wrong(
    "REINFORCE with a baseline",
    lambda m, b: (
        -(out(m, b).log_softmax(1)[:, 0] * (b["advantage"] - b["advantage"].mean())).mean()
    ),
)
wrong("a running normalizer", lambda m, b: (out(m, b) / out(m, b).detach().std()).square().mean())
wrong(
    "quantized by the largest",
    lambda m, b: (out(m, b) / out(m, b).detach().abs().max()).square().mean(),
)
wrong(
    "global min-max",
    lambda m, b: ((out(m, b) - out(m, b).min()) / (out(m, b).max() - out(m, b).min())).mean(),
)
wrong(
    "ghost statistics",
    lambda m, b: F.instance_norm(out(m, b).T[None]).mul(b["t"].T[None]).square().mean(),
)
wrong(
    "load balancing",
    lambda m, b: (
        F.cross_entropy(out(m, b), b["y"])
        + C
        * (out(m, b).softmax(1).mean(0) * F.one_hot(out(m, b).argmax(1), C).float().mean(0)).sum()
    ),
)
wrong(
    "mixture with the mean",
    lambda m, b: (out(m, 0 * 1 or b) + 0.1 * out(m, b).mean(0, keepdim=True)).square().mean(),
)


# --- wrong: random numbers that mix samples


def mixup(m, b):
    share, order = random.random(), torch.randperm(len(b["x"]))
    x = share * b["x"] + (1 - share) * b["x"][order]
    return m(x).square().mean()


def numpy_mixup(m, b):
    import numpy as np

    share, order = np.random.beta(1, 1), torch.from_numpy(np.random.permutation(len(b["x"])))
    return m(share * b["x"] + (1 - share) * b["x"][order]).square().mean()


def cutmix(m, b):
    order, cut = torch.randperm(len(b["x"])), D // 2
    x = torch.cat([b["x"][:, :cut], b["x"][order][:, cut:]], 1)
    return F.cross_entropy(m(x), b["y"])


wrong("mixup", mixup)
wrong("mixup with NumPy", numpy_mixup)
wrong("cutmix", cutmix)
wrong(
    "shuffled negatives",
    lambda m, b: F.triplet_margin_loss(out(m, b), b["t"], out(m, b)[torch.randperm(len(b["x"]))]),
)
wrong(
    "random negatives",
    lambda m, b: (out(m, b) * out(m, b)[torch.randint(len(b["x"]), (len(b["x"]),))]).mean(),
)
wrong(
    "negatives of Python",
    lambda m, b: (out(m, b) * out(m, b)[random.sample(range(len(b["x"])), len(b["x"]))]).mean(),
)
wrong(
    "VAE with a sum",
    lambda m, b: F.mse_loss(out(m, b) + 0.3 * torch.randn_like(out(m, b)), b["t"], reduction="sum"),
)
wrong(
    "dropout and ignored labels",
    lambda m, b: F.cross_entropy(F.dropout(out(m, b), 0.2), b["ignored"]),
)
wrong(
    "dropout and a root",
    lambda m, b: F.dropout(out(m, b), 0.2).square().mean().sqrt(),
    lambda: net(C, nn.Dropout(0.3)),
)

# --- wrong: outputs that depend on other samples

wrong("centred outputs", lambda m, b: out(m, b) - out(m, b).mean(0), loss=lambda o: o.std())
wrong(
    "ranked outputs",
    lambda m, b: out(m, b) * torch.arange(len(b["x"]))[:, None],
    loss=lambda o: o.square().mean(),
)
wrong("outputs over their norm", lambda m, b: out(m, b) / out(m, b).norm(), loss=lambda o: o.var())

# --- right

right("cross entropy", lambda m, b: F.cross_entropy(out(m, b), b["y"]))
right("label smoothing", lambda m, b: F.cross_entropy(out(m, b), b["y"], label_smoothing=0.1))
for name, criterion in {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth l1": F.smooth_l1_loss, "huber": F.huber_loss,
}.items():  # fmt: skip
    right(name, lambda m, b, criterion=criterion: criterion(out(m, b), b["t"]))
right("bce", lambda m, b: F.binary_cross_entropy_with_logits(out(m, b), b["binary"]))
right(
    "bce with pos_weight",
    lambda m, b: F.binary_cross_entropy_with_logits(
        out(m, b), b["binary"], pos_weight=torch.full((C,), 3.0)
    ),
)
right("multi-margin", lambda m, b: F.multi_margin_loss(out(m, b), b["y"]))
right("soft margin", lambda m, b: F.soft_margin_loss(out(m, b)[:, 0], b["sign"]))
right("hinge embedding", lambda m, b: F.hinge_embedding_loss(out(m, b)[:, 0], b["sign"]))
right("poisson nll", lambda m, b: F.poisson_nll_loss(out(m, b), b["binary"]))
right("gaussian nll", lambda m, b: F.gaussian_nll_loss(out(m, b), b["t"], b["w"][:, None]))
right("cosine embedding", lambda m, b: F.cosine_embedding_loss(out(m, b), b["t"], b["sign"]))
right(
    "margin ranking of pairs",
    lambda m, b: F.margin_ranking_loss(out(m, b)[:, 0], b["t"][:, 0], b["sign"]),
)
right("triplets of the batch", lambda m, b: F.triplet_margin_loss(out(m, b), b["t"], b["binary"]))
right(
    "kl batchmean",
    lambda m, b: F.kl_div(out(m, b).log_softmax(1), b["t"].softmax(1), reduction="batchmean"),
)
right("log cosh", lambda m, b: (out(m, b) - b["t"]).cosh().log().mean())
right(
    "quantile regression",
    lambda m, b: torch.maximum(0.9 * (out(m, b) - b["t"]), -0.1 * (out(m, b) - b["t"])).mean(),
)
right("root for each sample", lambda m, b: out(m, b).square().mean(1).sqrt().mean())
right(
    "dice for each sample",
    lambda m, b: (
        1
        - 2
        * (out(m, b).sigmoid() * b["binary"]).sum(1)
        / (out(m, b).sigmoid() + b["binary"]).sum(1)
    ).mean(),
)
right(
    "focal",
    lambda m, b: (
        (1 - out(m, b).softmax(1).gather(1, b["y"][:, None]))[:, 0].square()
        * F.cross_entropy(out(m, b), b["y"], reduction="none")
    ).mean(),
)
right(
    "weights of samples over all of them", lambda m, b: (out(m, b).square().mean(1) * b["w"]).mean()
)
right("a mask over all samples", lambda m, b: (out(m, b).square().mean(1) * b["mask"]).mean())
right("a penalty in a mean", lambda m, b: out(m, b).square().mean() + m[0].weight.square().sum())
right(
    "penalty once", lambda m, b: out(m, b).square().sum(), loss="sum", once=lambda: torch.ones(())
)
right("a sum", lambda m, b: out(m, b).square().sum(), loss="sum")
right(
    "a sum of cross entropies",
    lambda m, b: F.cross_entropy(out(m, b), b["y"], reduction="sum"),
    loss="sum",
)
right(
    "ignored labels",
    lambda m, b: F.cross_entropy(out(m, b), b["ignored"]),
    weight=lambda b: (b["ignored"] != -100).sum(),
)
right(
    "class weights",
    lambda m, b: F.cross_entropy(out(m, b), b["y"], CLASS_WEIGHTS),
    weight=lambda b: CLASS_WEIGHTS[b["y"]].sum(),
)
right(
    "a pair",
    lambda m, b: (
        F.cross_entropy(out(m, b), b["ignored"], reduction="sum"),
        (b["ignored"] != -100).sum(),
    ),
)
right(
    "a dict of pairs",
    lambda m, b: {
        "ce": (
            F.cross_entropy(out(m, b), b["ignored"], reduction="sum"),
            (b["ignored"] >= 0).sum(),
        ),
        "size": (out(m, b).square().sum(), out(m, b).numel()),
    },
)
right(
    "a dict of means",
    lambda m, b: {"ce": F.cross_entropy(out(m, b), b["y"]), "size": out(m, b).square().mean()},
)
right("root by then", lambda m, b: F.mse_loss(out(m, b), b["t"]), then=torch.sqrt)
right("log of a sum by then", lambda m, b: out(m, b).exp().sum(), loss="sum", then=torch.log)
right(
    "InfoNCE by outputs", lambda m, b: (unit(out(m, b)), unit(b["t"])), loss=lambda o: info_nce(*o)
)
right("SimCLR by outputs", out, loss=simclr)
right(
    "triplet by outputs",
    lambda m, b: {"o": out(m, b), "y": b["y"]},
    loss=lambda o: batch_hard(o["o"], o["y"]),
)
right("variance by outputs", out, loss=lambda o: o.var(0).sum())
right("a loss that wants all samples", out, loss=lambda o: o.reshape(N // 4, 4, C).var(1).mean())
right(
    "dropout modules",
    lambda m, b: out(m, b).square().mean(),
    lambda: net(C, nn.Dropout(0.5), nn.Dropout(0.1)),
)
right("functional dropout", lambda m, b: F.dropout(F.dropout(out(m, b)).tanh()).square().mean())
right(
    "attention with dropout",
    lambda m, b: (
        F.scaled_dot_product_attention(*[out(m, b)[:, None]] * 3, dropout_p=0.3).square().mean()
    ),
)
right("alpha dropout", lambda m, b: F.alpha_dropout(out(m, b), 0.3, True).square().mean())
right("noise", lambda m, b: m(b["x"] + torch.randn_like(b["x"])).square().mean())
right(
    "VAE",
    lambda m, b: F.mse_loss(
        out(m, b) + out(m, b).exp().sqrt() * torch.randn(len(b["x"]), C), b["t"]
    ),
)
right(
    "VAE with a sum",
    lambda m, b: F.mse_loss(out(m, b) + 0.3 * torch.randn_like(out(m, b)), b["t"], reduction="sum"),
    loss="sum",
)


def diffusion(m, b):
    t = torch.randint(1000, (len(b["x"]),))
    share = (1 - t / 1000.0)[:, None].sqrt()
    noise = torch.randn_like(b["x"])
    return F.mse_loss(m(share * b["x"] + (1 - share**2).sqrt() * noise), noise[:, :C])


right("diffusion", diffusion)
right("diffusion with dropout", diffusion, lambda: net(C, nn.Dropout(0.2)))
right(
    "stochastic depth",
    lambda m, b: (
        (out(m, b) * torch.bernoulli(torch.full((len(b["x"]), 1), 0.8)) / 0.8).square().mean()
    ),
)
right(
    "layer drop of Python",
    lambda m, b: (out(m, b) if random.random() < 0.5 else out(m, b).tanh()).square().mean(),
)
right(
    "noise of Python for each sample",
    lambda m, b: (out(m, b) * torch.tensor([[random.random()] for _ in b["x"]])).square().mean(),
)


def numpy_noise(m, b):
    import numpy as np

    return m(b["x"] + torch.from_numpy(np.random.randn(*b["x"].shape)).float()).square().mean()


right("noise of NumPy", numpy_noise)
right("gumbel softmax", lambda m, b: (F.gumbel_softmax(out(m, b), hard=True) * b["t"]).mean())
right(
    "sampled actions",
    lambda m, b: (
        -(
            torch.distributions.Categorical(logits=out(m, b)).log_prob(
                torch.multinomial(out(m, b).detach().softmax(1), 1)[:, 0]
            )
            * b["advantage"]
        ).mean()
    ),
)
right(
    "PPO",
    lambda m, b: (
        -torch.minimum(
            (out(m, b)[:, 0] - b["old"]).exp() * b["advantage"],
            (out(m, b)[:, 0] - b["old"]).exp().clamp(0.8, 1.2) * b["advantage"],
        ).mean()
    ),
)
right(
    "zero in value",
    lambda m, b: (
        torch.exp(out(m, b)[:, 0] - out(m, b)[:, 0].detach()) * b["advantage"] - b["advantage"]
    ).mean(),
)
right("checkpointed", lambda m, b: checkpoint(m, b["x"], use_reentrant=False).square().mean())
right(
    "checkpointed with dropout",
    lambda m, b: checkpoint(m, b["x"], use_reentrant=False).square().mean(),
    lambda: net(C, nn.Dropout(0.5)),
)
right(
    "reentrant checkpoint",
    lambda m, b: checkpoint(m, b["x"].requires_grad_(), use_reentrant=True).square().mean(),
)
right(
    "bfloat16",
    lambda m, b: F.cross_entropy(m(b["x"].bfloat16()).float(), b["y"]),
    lambda: net().bfloat16(),
)
right("float64", lambda m, b: m(b["x"].double()).square().mean(), lambda: net().double())


def autocast(m, b):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(m(b["x"]), b["y"])


right("autocast", autocast)
right("autocast with dropout", autocast, lambda: net(C, nn.Dropout(0.5)))
right("nan", lambda m, b: out(m, b).square().mean() * math.nan)
right("infinite", lambda m, b: (out(m, b).square().mean() + 1e38) * 1e38)
right("layer norm", lambda m, b: out(m, b).square().mean(), lambda: net(C, nn.LayerNorm(8)))
right("group norm", lambda m, b: out(m, b).square().mean(), lambda: net(C, nn.GroupNorm(2, 8)))
right(
    "frozen batch norm",
    lambda m, b: out(m, b).square().mean(),
    lambda: net(C, nn.BatchNorm1d(8).eval()),
)
right(
    "batch norm per chunk",
    lambda m, b: out(m, b).square().mean(),
    lambda: net(C, nn.BatchNorm1d(8)),
    batchnorm="per_chunk",
)
right(
    "spectral norm",
    lambda m, b: out(m, b).square().mean(),
    lambda: nn.utils.spectral_norm(nn.Linear(D, C)).eval(),
)
right(
    "weight norm",
    lambda m, b: out(m, b).square().mean(),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, C)),
)
right(
    "LSTM",
    lambda m, b: m(b["x"][:, None])[0].square().mean(),
    lambda: nn.LSTM(D, C, 2, batch_first=True, dropout=0.2),
)
right("GRU cell", lambda m, b: m(b["x"]).square().mean(), lambda: nn.GRUCell(D, C))
right(
    "attention in samples",
    lambda m, b: m(b["x"].reshape(-1, 3, 2)).square().mean(),
    lambda: nn.TransformerEncoderLayer(2, 1, 8, dropout=0.1, batch_first=True),
)
right(
    "convolution",
    lambda m, b: m(b["x"][:, None]).square().mean(),
    lambda: nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2)),
)
right("embedding", lambda m, b: m(b["y"]).square().mean(), lambda: nn.Embedding(C, 4))
right(
    "sparse embedding",
    lambda m, b: m(b["y"]).square().mean(),
    lambda: nn.Embedding(C, 4, sparse=True),
)
right("a detached target", lambda m, b: F.mse_loss(out(m, b), out(m, b).detach() * 0.5))
right(
    "gradient penalty",
    lambda m, b: (
        torch.autograd.grad(m(x := b["x"].detach().requires_grad_()).sum(), x, create_graph=True)[0]
        .square()
        .sum(1)
        .mean()
    ),
)
right("argmax inside", lambda m, b: F.cross_entropy(out(m, b), out(m, b).argmax(1)))
right("topk in a sample", lambda m, b: out(m, b).topk(2, 1).values.mean())
right("sort in a sample", lambda m, b: (out(m, b).sort(1).values * b["t"]).mean())
right("a double mean", lambda m, b: out(m, b).mean(1).mean(0))
right("half the features", lambda m, b: out(m, b)[:, ::2].square().mean())
right("constant plus mean", lambda m, b: out(m, b).square().mean() + 3.0)
right("scaled", lambda m, b: out(m, b).square().mean() * 1e-8)
right("huge", lambda m, b: out(m, b).square().mean() * 1e20)
