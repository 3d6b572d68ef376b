"""Weights and counts of nothing, or of no number: ranks get what one process gets, or an error."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import step

from ..step.step_cases import IGNORED, gradients
from .launch import run_ranks
from .rank_cases import SIZES, all_samples, joined, net_of


def n_valid(b):
    return (b["y"] != IGNORED).sum()


def ce(run, b, reduction="mean"):
    return F.cross_entropy(run(b["x"]), b["y"], ignore_index=IGNORED, reduction=reduction)


LOSSES = {
    "weight": (ce, {"weight": n_valid}),
    "pair": (lambda run, b: (ce(run, b, "sum"), n_valid(b)), {}),
}


def nothing_on(rank, loss, ignored, idle, maximum):
    """The loss and the gradients of ranks, beside those of one process with all samples."""
    parts = all_samples(SIZES[:3])
    for each in ignored:
        parts[each]["y"][:] = IGNORED
    fn, how = LOSSES[loss]
    net, alone = net_of(), net_of()
    there = [part for i, part in enumerate(parts) if i not in idle]
    one = step(lambda b: fn(alone, b), joined(there), maximum=maximum, **how)
    module = Replicated(net)
    batch = None if rank in idle else parts[rank]
    all_ = step(lambda b: fn(module, b), batch, maximum=maximum, **how)
    got, wanted = [all_.loss, *gradients(net).values()], [one.loss, *gradients(alone).values()]
    is_close = all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )
    return is_close, str(float(one.loss)), str(float(all_.loss))


@pytest.mark.exhaustive
@pytest.mark.parametrize("maximum", [None, 4])
@pytest.mark.parametrize(
    ("ignored", "idle"),
    [((0, 1, 2), ()), ((0, 1), ()), ((0, 1, 2), (1,))],
    ids=["on all", "on two", "on all that have samples"],
)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_loss_over_nothing_is_what_one_process_gets(loss, ignored, idle, maximum):
    options = {"loss": loss, "ignored": ignored, "idle": idle, "maximum": maximum}
    for is_close, wanted, got in run_ranks(nothing_on, 3, **options):
        assert is_close, (wanted, got)


def no_number_on(rank, number, kind):
    parts = all_samples(SIZES[:2])
    net = net_of()
    module = Replicated(net)
    mine = float(number) if rank else 3.0

    def fn(b):
        loss = module(b["x"]).square()
        return (loss.sum(), torch.tensor(mine)) if kind == "pair" else loss.mean()

    how = {} if kind == "pair" else {"weight": lambda _: mine}
    try:
        step(fn, parts[rank], **how)
    except Exception as error:
        return type(error).__name__, str(error), not gradients(net)
    return None


@pytest.mark.parametrize("number", ["inf", "nan"])
@pytest.mark.parametrize("kind", ["pair", "weight"])
def test_a_count_that_is_no_number_on_one_rank_is_an_error_by_name_on_all(kind, number):
    (other, text, other_clean), (own, own_text, own_clean) = run_ranks(
        no_number_on, number=number, kind=kind
    )
    assert (other, own) == ("RemoteRankError", "AdaptiveUsageError")
    who = "The function of step() returned a count of" if kind == "pair" else "weight() returned"
    assert f"{who} {number}" in own_text
    assert f"rank 1 (tenure.adaptive.AdaptiveUsageError: {who} {number}" in text
    assert other_clean
    assert own_clean
