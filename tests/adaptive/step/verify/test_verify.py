"""A split that changes a loss is refused before it delivers; every other one is left alone."""

import math
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import NoBatchsizeCache, SplitMismatchError, check_split, step

from ...attempt.failures import out_of_memory_above
from ...unchanged import assert_same, traces, unchanged
from ..step_cases import gradients, refused, samples, small_net, wanted_of, worst_error

N, D, C = 24, 6, 5
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
WRONG, RIGHT, ADVICE = {}, {}, {}


def net(*middle):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, C))


def batch():
    """Vectors, labels of which some are ignored, targets, weights and masks."""
    y = torch.randint(C, (N,))
    return {
        "x": torch.randn(N, D),
        "y": y,
        "ignored": torch.where(torch.arange(N) % 3 == 1, -100, y),
        "t": torch.randn(N, C),
        "binary": (torch.rand(N, C) > 0.7).float(),
        "mask": torch.rand(N) > 0.4,
        "advantage": torch.randn(N),
    }


def wrong(name, loss, model=net, /, advice="", **options):
    """A loss of the model and the batch that a split changes, and a part of the advice."""
    WRONG[name] = loss, model, options
    ADVICE[name] = advice


def right(name, loss, model=net, /, **options):
    RIGHT[name] = loss, model, options


def prepared(case):
    """A function for `step`, a batch, the other arguments, and the model."""
    loss, make, options = case
    torch.manual_seed(0)
    model, data = make(), batch()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    cache = {"cache_type": NoBatchsizeCache, "model": model}
    return lambda b: loss(model, b), data, cache | options, model


def out(m, b):
    return m(b["x"])


def squares(m, b):
    return out(m, b).square().mean()


def entropy(m, b):
    return F.cross_entropy(out(m, b), b["y"])


def ignoring(m, b):
    return F.cross_entropy(out(m, b), b["ignored"])


def ignoring_sum(m, b):
    return F.cross_entropy(out(m, b), b["ignored"], reduction="sum")


def n_valid(b):
    return (b["ignored"] != -100).sum()


# --- wrong: what the mean divides by, and how it is declared

wrong("ignored labels", ignoring)
wrong("class weights", lambda m, b: F.cross_entropy(out(m, b), b["y"], CLASS_WEIGHTS))
wrong(
    "masked sum over the mask",
    lambda m, b: (out(m, b).square().mean(1) * b["mask"]).sum() / b["mask"].sum(),
    advice="weight=lambda batch: batch['mask'].sum()",
)
wrong("a sum", lambda m, b: out(m, b).square().sum(), advice='pass loss="sum".')
wrong("a mean declared as a sum", squares, loss="sum", advice='leave loss="sum" out.')
wrong(
    "the penalty in a sum",
    lambda m, b: out(m, b).square().sum() + m[0].weight.square().sum(),
    loss="sum",
    advice="Pass a penalty on parameters as once=.",
)
no_weight = lambda b: b["x"].abs().sum()  # noqa: E731
wrong("a weight that is none", squares, weight=no_weight, advice="leave weight= out.")
wrong("a pair with a wrong count", lambda m, b: (ignoring(m, b) * 1, n_valid(b)))


class Clamping(nn.Module):
    """Clamps the gradient of what it gets, as loops of recurrent networks do."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x * 1.0


wrong(
    "a pair whose gradient is clamped",
    lambda m, b: (ignoring_sum(m, b), n_valid(b)),
    lambda: net(Clamping()),
    advice="Return the mean, and pass the count as weight=.",
)

# --- wrong: functions of means, samples against samples, and samples that are chosen among all

wrong("root", lambda m, b: squares(m, b).sqrt(), advice="then=torch.sqrt.")
wrong("exponential", lambda m, b: squares(m, b).exp(), advice="then=torch.exp.")
wrong(
    "log of a sum",
    lambda m, b: out(m, b).exp().sum().log(),
    loss="sum",
    advice='pass loss="sum", then=torch.log.',
)
COMPUTED = "pass what is computed of all of them as loss="
wrong("standard deviation", lambda m, b: out(m, b).std(), advice=COMPUTED)


def dice(m, b):
    p, t = out(m, b).sigmoid(), b["binary"]
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def info_nce(m, b):
    return F.cross_entropy(out(m, b) @ b["t"].T, torch.arange(len(b["x"])))


wrong(
    "a sum and a mean",
    lambda m, b: {"sum": out(m, b).exp().sum(), "mean": entropy(m, b)},
    advice="The term 'sum' is a sum over samples",
)
wrong("dice and cross entropy", lambda m, b: dice(m, b) + entropy(m, b))
wrong("InfoNCE", info_nce)
# its value is that of a mean, and a declaration that fits it as well would not help
wrong(
    "of which the gradient alone differs",
    lambda m, b: squares(m, b) - (o := out(m, b).mean()).square() + o.detach().square(),
    weight=lambda b: len(b["x"]),
    advice=COMPUTED,
)
wrong(
    "hard examples of a fixed number",
    lambda m, b: F.cross_entropy(out(m, b), b["y"], reduction="none").topk(3).values.mean(),
)

# --- wrong: inside of the function, and outputs that depend on other samples

wrong(
    "functional batch norm",
    lambda m, b: F.batch_norm(out(m, b), None, None, training=True).mul(b["t"]).mean(),
)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


wrong("a module", squares, lambda: net(Centred()), advice=".2 (Centred) mixes the samples")
wrong(
    "root, batch norm per chunk",
    lambda m, b: squares(m, b).sqrt(),
    lambda: net(nn.BatchNorm1d(8)),
    batchnorm="per_chunk",
)


def ppo(m, b):
    """In its first epoch, where its value is zero whatever is split."""
    advantage = (b["advantage"] - b["advantage"].mean()) / b["advantage"].std()
    log = out(m, b).log_softmax(1).gather(1, b["y"][:, None])[:, 0]
    return -(torch.exp(log - log.detach()) * advantage).mean()


class Remembering(nn.Module):
    """Adds what its last call has left in an attribute."""

    last = 0.0

    def forward(self, x):
        before, self.last = self.last, x.detach().mean(0)
        return x + before


REMEMBERS = "the one before has written into model.2.last. Update that after step()"
wrong("a module that remembers", squares, lambda: net(Remembering()), advice=REMEMBERS)
wrong("PPO", ppo)
wrong(
    "centred outputs",
    lambda m, b: out(m, b) - out(m, b).mean(0),
    loss=lambda o: o.std(),
    advice="do the rest in loss=, which gets all outputs.",
)
KEPT = {}


def keeping(value):
    """A function that keeps elsewhere what its loss= reads."""

    def fn(m, b):
        m.kept = KEPT["kept"] = value(m, b)
        return out(m, b)

    return fn


for kept, value in {
    "with a graph": out,
    "without a graph": lambda m, b: out(m, b).detach(),
    "of parameters": lambda m, b: m[0].weight.norm(),
    "a number": lambda m, b: out(m, b).square().sum().item(),
}.items():
    wrong(
        f"a loss of what the function kept, {kept}",
        keeping(value),
        loss=lambda o: o.square().mean() * torch.as_tensor(KEPT["kept"]).square().sum(),
        advice="or loss= reads what it keeps elsewhere, such as model.kept: ",
    )

# --- wrong: random numbers that mix samples, or hide nothing


def mixup(m, b):
    share, order = random.random(), torch.randperm(len(b["x"]))
    return m(share * b["x"] + (1 - share) * b["x"][order]).square().mean()


def numpy_mixup(m, b):
    share, order = np.random.beta(0.2, 0.2), torch.from_numpy(np.random.permutation(len(b["x"])))
    return m(share * b["x"] + (1 - share) * b["x"][order]).square().mean()


def numpy_noise(m, b):
    return m(b["x"] + torch.from_numpy(np.random.randn(len(b["x"]), D)).float()).std(1)


def random_pairs(m, b):
    return (out(m, b) * out(m, b)[torch.randint(len(b["x"]), (len(b["x"]),))]).mean()


wrong("mixup", mixup)
wrong("mixup by NumPy", numpy_mixup)
wrong("random pairs", random_pairs)
wrong("a sum of NumPy's noise", lambda m, b: numpy_noise(m, b).sum())
wrong("a mean of NumPy's noise", lambda m, b: numpy_noise(m, b).mean(), loss="sum")
PAST: list[float] = []


def by_past_losses(m, b):
    loss = squares(m, b)
    PAST.append(loss.item())
    return loss / (sum(PAST) / len(PAST))


wrong("divided by past losses", by_past_losses)
wrong("dropout and ignored labels", ignoring, lambda: net(nn.Dropout(0.2)))

# --- right: what is declared

right("cross entropy", entropy)
right(
    "kl batchmean",
    lambda m, b: F.kl_div(out(m, b).log_softmax(1), b["t"].softmax(1), reduction="batchmean"),
)
right("a penalty in a mean", lambda m, b: squares(m, b) + m[0].weight.square().sum())
right("penalty once", lambda m, b: out(m, b).sum(), loss="sum", once=lambda: torch.ones(()))
right("ignored labels", ignoring, weight=n_valid)
right("a mean whose gradient is clamped", ignoring, lambda: net(Clamping()), weight=n_valid)
right(
    "pairs in a dict",
    lambda m, b: {
        "ce": (ignoring_sum(m, b), n_valid(b)),
        "size": (out(m, b).square().sum(), out(m, b).numel()),
    },
)
right(
    "a sum and a mean",
    lambda m, b: {"sum": (out(m, b).exp().sum(), len(b["x"]) / N), "mean": entropy(m, b)},
)
right("root by then", squares, then=torch.sqrt)
right("log of a sum by then", lambda m, b: out(m, b).exp().sum(), loss="sum", then=torch.log)
right("InfoNCE by outputs", lambda m, b: (out(m, b), b["t"]), loss=lambda o: (o[0] @ o[1].T).std())

# --- right: random numbers

right("dropout", squares, lambda: net(nn.Dropout(0.5), nn.Dropout(0.1)))


def diffusion(m, b):
    t = torch.randint(1000, (len(b["x"]),))
    share = (1 - t / 1000.0)[:, None].sqrt()
    noise = torch.randn_like(b["x"])
    return F.mse_loss(m(share * b["x"] + (1 - share**2).sqrt() * noise), noise[:, :C])


right("diffusion with dropout", diffusion, lambda: net(nn.Dropout(0.2)))
right(
    "layer drop of Python",
    lambda m, b: (out(m, b) if random.random() < 0.5 else out(m, b).tanh()).square().mean(),
)
right(
    "noise of Python",
    lambda m, b: (out(m, b) * torch.tensor([[random.random()] for _ in b["x"]])).square().mean(),
)
right("noise of NumPy", lambda m, b: numpy_noise(m, b).mean())
right(
    "zero in value",
    lambda m, b: (
        torch.exp(out(m, b)[:, 0] - out(m, b)[:, 0].detach()) * b["advantage"] - b["advantage"]
    ).mean(),
)

# --- right: how it runs, and with what numbers

right(
    "checkpointed with dropout",
    lambda m, b: checkpoint(m, b["x"], use_reentrant=False).square().mean(),
    lambda: net(nn.Dropout(0.5)),
)
right(
    "reentrant checkpoint",
    lambda m, b: checkpoint(m, b["x"].requires_grad_(), use_reentrant=True).square().mean(),
)
right(
    "reentrant checkpoint of what was computed",
    lambda m, b: checkpoint(m[1:], m[0](b["x"]), use_reentrant=True).square().mean(),
)
right(
    "bfloat16",
    lambda m, b: F.cross_entropy(m(b["x"].bfloat16()).float(), b["y"]),
    lambda: net().bfloat16(),
)


def autocast(m, b):
    with torch.autocast("cpu", torch.bfloat16):
        return entropy(m, b)


right("autocast with dropout", autocast, lambda: net(nn.Dropout(0.5)))
right("nan", lambda m, b: squares(m, b) * math.nan)
right("infinite", lambda m, b: (squares(m, b) + 1e38) * 1e38)


def chaotic(m, b):
    """Rounding is all that a split changes, as in an RNN that was not trained yet."""
    x = out(m, b).sigmoid()
    for _ in range(20):
        x = 3.9 * x * (1 - x)
    return x.mean()


right("chaotic", chaotic)
right("huge", lambda m, b: squares(m, b) * 1e20)
right("frozen batch norm", squares, lambda: net(nn.BatchNorm1d(8).eval()))
right("batch norm per chunk", squares, lambda: net(nn.BatchNorm1d(8)), batchnorm="per_chunk")
right(
    "LSTM",
    lambda m, b: m(b["x"][:, None])[0].square().mean(),
    lambda: nn.LSTM(D, C, 2, batch_first=True, dropout=0.2),
)
right(
    "sparse embedding",
    lambda m, b: m(b["y"]).square().mean(),
    lambda: nn.Embedding(C, 4, sparse=True),
)
right(
    "gradient penalty",
    lambda m, b: (
        torch.autograd.grad(m(x := b["x"].detach().requires_grad_()).sum(), x, create_graph=True)[0]
        .square()
        .sum(1)
        .mean()
    ),
)


def running_out_above(fn, most):
    check = out_of_memory_above(most)
    return lambda batch: check(len(batch["x"])) or fn(batch)


@pytest.mark.parametrize(
    ("name", "forcing"),
    [*[(name, "maximum") for name in WRONG], ("root", "memory"), ("mixup by NumPy", "memory")],
)
def test_a_loss_that_a_split_changes_is_refused_and_leaves_no_trace(name, forcing):
    fn, data, options, model = prepared(WRONG[name])
    for p in list(model.parameters())[1:]:
        p.grad = torch.ones_like(p)
    if forcing == "maximum":
        options["maximum"] = 8
    else:
        fn = running_out_above(fn, 8)
    expected = pytest.raises(SplitMismatchError, match="would give other results then")
    with unchanged(model), expected as caught:
        step(fn, data, **options)
    assert caught.value.whole != caught.value.split
    assert caught.value.advice
    assert ADVICE[name] in caught.value.advice
    assert caught.value.advice in str(caught.value)


@pytest.mark.parametrize(
    ("name", "maximum"), [*[(name, 8) for name in RIGHT], ("dropout", 1), ("pairs in a dict", 1)]
)
def test_a_loss_that_a_split_leaves_alone_has_what_it_has_without_verification(name, maximum):
    left = []
    for verify in (False, True):
        fn, data, options, model = prepared(RIGHT[name])
        result = step(fn, data, maximum=maximum, verify=verify, **options)
        assert len(result.sizes) > 1
        left.append([*traces(model), result.loss, result.sizes])
    assert_same(*left)


def test_mixing_by_numpys_numbers_is_refused_whatever_the_seed():
    # Beta(0.2, 0.2) gives nearly 0 or 1 three times, and as samples are first compared
    for seed in (21, 40):
        fn, data, options, _ = prepared(WRONG["mixup by NumPy"])
        np.random.seed(seed)
        refused(fn, data, maximum=8, **options)


@pytest.mark.parametrize("draw", [lambda n: random.random(), np.random.rand])
def test_numbers_of_python_and_numpy_hide_no_mean_over_tokens(draw):
    net = small_net()

    def fn(b):
        draw(len(b["x"]))
        return F.cross_entropy(net(b["x"]).flatten(0, 1), b["y"].flatten(), ignore_index=0)

    # two batches of which 8 samples, exchanged for others in groups, tell nothing
    for seed in (2, 6):
        torch.manual_seed(seed)
        n_tokens = torch.randint(3, 7, (20, 1))
        y = torch.randint(1, 3, (20, 6)).where(torch.arange(6) < n_tokens, 0)
        refused(fn, {"x": torch.randn(20, 6, 4).double(), "y": y}, maximum=5)


# --- what the error says


def test_the_error_tells_both_numbers_and_what_to_declare():
    net, scaler = small_net(), torch.amp.GradScaler("cpu")

    def rooted(b):
        return net(b).square().mean().sqrt()

    error = refused(rooted, samples(16), scaler=scaler)
    # it was not asked for its scale
    assert scaler._scale is None
    assert str(error) == (
        "The batch of 16 has to be split into micro-batches of 4, and 'rooted' would give other "
        f"results then: the loss for 8 samples is {error.whole:.6g} in one piece and "
        f"{error.split:.6g} as 5 + 3 "
        f"({100 * abs(error.whole - error.split) / error.whole:.2g} % off). "
        "Gradients and modules are as before. "
        'It is a function of a mean: return that without the root, and pass loss="mean", '
        "then=torch.sqrt."
    )
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error)
    assert (other.whole, other.split, other.advice) == (error.whole, error.split, error.advice)


def test_a_tiny_difference_is_told_in_digits_that_differ_and_with_what_may_cause_it():
    net = small_net()

    def normalized(x, reduction):
        start = torch.zeros_like(x, requires_grad=True)
        out = net(x + start).square()
        (gradient,) = torch.autograd.grad(getattr(out, reduction)(), start)
        step_to = gradient / (gradient.norm(dim=1, keepdim=True) + 1e-8)
        return net(x + step_to).square().mean()

    error = refused(lambda b: normalized(b, "mean"), samples(16))
    assert f"{error.whole:.6g}" == f"{error.split:.6g}"
    assert f"is {error.whole:.10g} in one piece and {error.split:.10g} as 5 + 3" in str(error)
    assert 'take that of the sum (reduction="sum")' in error.advice
    step(lambda b: normalized(b, "sum"), samples(16), maximum=4)


@pytest.mark.parametrize("name", ["criterion.weight", "w"])
def test_weights_of_classes_are_named_as_what_the_mean_divides_by(name):
    torch.manual_seed(0)
    net, w = nn.Linear(3, 4).double(), torch.tensor([0.1, 1.0, 5.0, 2.0]).double()
    batch = torch.randn(32, 3, dtype=torch.float64), torch.arange(32) % 4
    criterion = nn.CrossEntropyLoss(weight=w)

    def by_module(batch):
        return criterion(net(batch[0]), batch[1])

    def by_function(batch):
        return F.cross_entropy(net(batch[0]), batch[1], weight=w)

    loss_of = by_function if name == "w" else by_module
    shown = refused(loss_of, batch).advice.partition("weight=")[2].partition(" (with")[0]
    assert shown == f"lambda batch: {name}[batch[1]].sum()"
    wanted = wanted_of(net, loss_of(batch))
    step(loss_of, batch, maximum=4, weight=eval(shown, {"criterion": criterion, "w": w}))
    assert worst_error(gradients(net), wanted) < 1e-10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
def test_a_mean_over_the_tokens_that_count_is_refused_in_every_precision(dtype, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 50))
    net.to(None if dtype == "autocast" else dtype)
    ids, lengths = torch.randint(1, 50, (64, 20)), torch.randint(14, 21, (64,)).sort().values
    mask = (torch.arange(20) < lengths[:, None]).long()
    batch = {"ids": ids, "mask": mask, "labels": ids.roll(-1, 1).masked_fill(mask == 0, -100)}

    def fn(b):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            return F.cross_entropy(net(b["ids"]).flatten(0, 1), b["labels"].flatten())

    advice = refused(fn, batch, maximum=16).advice
    assert not check_split(fn, batch)
    # the mask of the inputs counts as much, until prompts are ignored; so does one place less for
    # each row, nearly
    assert dtype is torch.bfloat16 or "batch: (batch['labels'] != -100).sum() (with" in advice
    declared = {"weight": lambda b: (b["labels"] != -100).sum()}
    assert check_split(fn, batch, **declared)
    step(fn, batch, maximum=16, **declared)


@pytest.mark.parametrize(
    "mix", [lambda b: 0.3 * b + 0.7 * b[torch.randperm(len(b))], lambda b: b - b.mean(0)]
)
def test_a_module_is_innocent_of_what_the_function_mixes_before_it(mix):
    net = small_net()
    advice = refused(lambda b: net(mix(b)).square().mean(), samples(12)).advice
    assert advice.startswith("Return the outputs, one for each sample")
    assert "Mix samples, as in mixup, before step()." in advice


# --- random numbers are constant while a step is verified, and rounding is no difference

DRAWS = {
    "rand": torch.rand,
    "randint": lambda n: torch.randint(3, 9, (n,)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, dtype=torch.float64)),
    "normal of means and deviations": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(0.3),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(4),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 4), 2)[:, 0],
    "multinomial again": lambda n: torch.multinomial(torch.ones(n, 4), 2, replacement=True)[:, 0],
    "poisson": lambda n: torch.poisson(torch.ones(n)),
    "gamma": lambda n: torch.distributions.Gamma(torch.ones(n), 1.0).sample(),
    "dropout": lambda n: F.dropout(torch.ones(n), 0.4),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n), 0.4, True),
    "a generator's": lambda n: torch.rand(n, generator=torch.Generator()),
    # torch's own is not known to be constant: samples are exchanged
    "binomial": lambda n: torch.binomial(torch.full((n,), 4.0), torch.full((n,), 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_are_drawn_for_each_sample_hide_no_root_and_are_no_difference(name):
    net = small_net()

    def fn(b):
        # another one draws after it
        factor = 1 + DRAWS[name](len(b)).double() + torch.rand(len(b)).double()
        return (net(b) * factor[:, None]).square().mean()

    x = samples(40)
    assert len(step(fn, x, maximum=9).sizes) == 5
    refused(lambda b: fn(b).sqrt(), x, maximum=9)


def entropy_of_32_bits(net, batch):
    """In float32, as the losses of transformers are whatever the type of the model."""
    return F.cross_entropy(net(batch["x"]).float(), batch["y"])


ROUNDED = {
    "a loss that is wide again": (lambda net, batch: entropy_of_32_bits(net, batch).double(), {}),
    "one of two terms": (
        lambda net, b: {"entropy": entropy_of_32_bits(net, b), "norm": net(b["x"]).square().mean()},
        {},
    ),
    "what a root is taken of": (entropy_of_32_bits, {"then": lambda value: value.double().sqrt()}),
    "outputs": (lambda net, batch: net(batch["x"]).float(), {"loss": lambda out: out.std()}),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_a_loss_that_is_rounded_on_the_way_is_right_and_hides_no_mismatch(what):
    fn, options = ROUNDED[what]
    for seed in (1, 6, 7):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(5, (8,))}
        assert step(lambda b: fn(net, b), batch, maximum=3, **options).sizes == (3, 3, 2)  # noqa: B023
    if not options:
        batch["y"][:3] = -100
        refused(lambda b: fn(net, b), batch, maximum=3)
