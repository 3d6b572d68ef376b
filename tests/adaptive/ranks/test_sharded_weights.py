"""Sharded modules where samples weigh nothing: every rank runs backward, or others would wait."""

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tenure.adaptive import step

from .launch import run_ranks
from .sharded_nets import sharded, tokens, wait_at_most, whole
from .test_step_sharded import RTOL, differs

SIZES = (9, 5)
IGNORED = -100
LOSSES = ("of torch", "divided by hand", "two terms")


def batch_of(rank, ignored):
    """Samples whose labels are ignored where ``ignored`` says so, from a sample on to another."""
    x = tokens(SIZES[rank], seed=rank)
    y = x.where(x > 20, IGNORED)
    for where, start, end in ignored:
        if where == rank:
            y[start:end] = IGNORED
    return {"x": x, "y": y}


def n_known(b):
    return (b["y"] != IGNORED).sum()


def loss_of(net, kind):
    """The mean over known labels; 0 / 0 where there are none."""

    def fn(b):
        out, y = net(b["x"]).flatten(0, 1), b["y"].flatten()
        if kind == "of torch":
            return F.cross_entropy(out, y)
        each = F.cross_entropy(out, y, reduction="none")
        words = each.sum() / (y != IGNORED).sum()
        size = out[y != IGNORED].square().mean()
        return {"words": words, "size": size} if kind == "two terms" else words

    return fn


def nothing_counts(rank, ignored):
    parts = [batch_of(each, ignored) for each in range(2)]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    found = []
    for kind in LOSSES:
        plain = whole().double()
        loss = loss_of(plain, kind)(joined)
        loss = sum(loss.values()) if kind == "two terms" else loss
        loss.backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        for maximum in (4, 9):
            net = sharded(whole().double())
            result = step(loss_of(net, kind), parts[rank], weight=n_known, maximum=maximum)
            found.append([differs(net, wanted), abs(float(result.loss) - float(loss.detach()))])
    return found


def are_exact(ignored):
    for found in run_ranks(nothing_counts, 2, timeout=60, ignored=ignored):
        assert len(found) == 6
        for error, of_loss in found:
            assert error < RTOL
            assert of_loss < 1e-10


@pytest.mark.slow
def test_a_rank_whose_labels_are_all_ignored_runs_backward_with_the_others():
    are_exact([(1, 0, 5)])


@pytest.mark.slow
def test_a_micro_batch_whose_labels_are_all_ignored_runs_backward_with_the_others():
    are_exact([(0, 0, 3), (1, 3, 5)])


def nothing_counts_anywhere(rank):
    net, part = sharded(whole().double()), batch_of(rank, [(0, 0, 9), (1, 0, 5)])
    result = step(loss_of(net, "of torch"), part, weight=n_known, maximum=4)
    # as of torch: the loss has no value, and nothing is learned
    zeros = {name: torch.zeros(p.shape) for name, p in whole().named_parameters()}
    return differs(net, zeros), str(float(result.loss))


def test_where_no_sample_of_any_rank_counts_the_loss_has_no_value_and_all_ranks_end():
    assert run_ranks(nothing_counts_anywhere, 2) == [[0.0, "nan"]] * 2


def outputs_unused(rank):
    """The loss of all outputs, of which it leaves out those of the second micro-batch of rank 1."""
    parts = [tokens(6, seed=each) for each in range(2)]
    used = [slice(0, 6), slice(0, 3)]

    def loss(which):
        return lambda out: out[used[which]].square().mean()

    plain = whole().double()
    (sum(loss(each)(plain(parts[each])) for each in range(2)) / 2).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    net = sharded(whole().double())
    step(net, parts[rank], loss=loss(rank), per_rank=True, maximum=3)
    return differs(net, wanted)


def test_a_micro_batch_whose_outputs_are_not_used_runs_backward_with_the_others():
    for error in run_ranks(outputs_unused, 2):
        assert error < RTOL


def without_loss(rank, folder):
    """A function that runs nothing where nothing counts: the other rank waits in its modules."""
    wait_at_most(1.0)
    net = sharded(whole())

    def fn(b):
        return loss_of(net, "of torch")(b) if not rank else torch.zeros(())

    return said_at_the_end(rank, folder, lambda: step(fn, batch_of(rank, []), maximum=9))


def said_at_the_end(rank, folder, work):
    try:
        work()
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(said)
    os._exit(0)


@pytest.mark.slow
def test_a_loss_that_needs_no_gradient_on_one_rank_is_refused_by_name(tmp_path):
    run_ranks(without_loss, 2, folder=str(tmp_path))
    waiting, failed = (Path(tmp_path, str(rank)).read_text() for rank in range(2))
    assert "returned a loss that does not require grad" in failed
    assert waiting.startswith("RemoteRankError")
