"""Ranks that are interrupted, die, or don't come: none waits for ever."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import RemoteRankError, find_batch_size, step

from ..step.step_cases import gradients, worst_error
from .launch import run_checks, run_ranks
from .rank_cases import (
    RTOL,
    SIZES,
    Fails,
    all_samples,
    net_of,
    replicated,
    square,
    squares,
    wanted_of,
)


def told_by(work):
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None, ""


class Interrupted(torch.nn.Module):
    """A module that is looked at when somebody presses Ctrl-C."""

    is_armed = False

    def __getattribute__(self, name):
        if name == "_modules" and self.is_armed:
            self.is_armed = False
            signal.raise_signal(signal.SIGINT)
        return super().__getattribute__(name)


def an_interrupt_before_the_vote(rank):
    """In the work, and while modules are looked for: it is told to the others."""
    seen, net, x = Interrupted(), net_of(), all_samples()[0]
    module = Replicated(net)

    def fn(b):
        if interrupts and rank:
            signal.raise_signal(signal.SIGINT)
        return square(module, b) + 0 * seen.training

    def searching():
        find_batch_size(lambda n: seen and n, high=8, group=dist.group.WORLD)

    for work in ("in the work", "in a step", "in a search"):
        interrupts = work == "in the work"
        seen.is_armed = bool(rank) and not interrupts
        name, text = told_by(searching if work == "in a search" else lambda: step(fn, x))
        assert name == ("KeyboardInterrupt" if rank else "RemoteRankError")
        assert rank or "failed on rank 1 (KeyboardInterrupt) of 2 ranks" in text
        assert not gradients(net)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        interrupts = False
        step(fn, x)
        net.zero_grad()


def an_interrupt_after_the_vote_has_begun(rank):
    """All get their gradients first."""
    parts, net, module, wanted = replicated()
    plain, all_reduce = dist.ProcessGroupGloo.send, dist.all_reduce
    for place in ("in the vote", "in the exchange"):
        armed = [place] if rank else []

        def interrupt(here, armed=armed):
            if armed == [here]:
                armed.clear()
                signal.raise_signal(signal.SIGINT)

        def exchanged(*args, interrupt=interrupt, **how):
            interrupt("in the exchange")
            return all_reduce(*args, **how)

        def sent(*args, interrupt=interrupt):
            interrupt("in the vote")
            return plain(*args)

        dist.ProcessGroupGloo.send, dist.all_reduce = sent, exchanged
        name, _ = told_by(lambda: step(squares(module), parts[rank]))
        dist.ProcessGroupGloo.send, dist.all_reduce = plain, all_reduce
        assert name == ("KeyboardInterrupt" if rank else None)
        assert worst_error(gradients(net), wanted) < RTOL
        net.zero_grad()


def a_program_that_ends_on_one_rank_and_errors_on_all(rank):
    module, kind = Replicated(net_of()), ValueError if rank else TypeError

    def fn(b):
        if rank:
            raise SystemExit(3)
        return square(module, b)

    name, text = told_by(lambda: step(fn, all_samples()[0]))
    assert name == "SystemExit" if rank else "rank 1 (SystemExit: 3)" in text
    # each has its own
    with pytest.raises(kind):
        step(Fails(squares(module), 0, kind), all_samples()[0])


def a_collective_that_the_program_has_begun(rank):
    """It is under way on one rank, where another has failed in a step before it begins."""
    fn = Fails(squares(Replicated(net_of())), 0 if rank else None, ValueError)
    found = torch.full((3,), 1.0 + rank)
    work = None if rank else dist.all_reduce(found, async_op=True)
    name, _ = told_by(lambda: step(fn, all_samples()[0]))
    work = dist.all_reduce(found, async_op=True) if work is None else work
    work.wait()
    assert name == ("ValueError" if rank else "RemoteRankError")
    assert found.tolist() == [3.0] * 3


def a_rank_that_comes_too_late(rank):
    """It is an error on all after the timeout of the group, and the next call goes well."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    net, parts = net_of(), all_samples(SIZES[:2])
    wanted = wanted_of(net, parts)
    for name in (None, "RemoteRankError", None):
        net.zero_grad()
        if rank and name:
            time.sleep(3)
        told = told_by(lambda: step(squares(net), parts[rank], group=group))
        assert told[0] == name
        assert rank or not name or "did not come" in told[1]
    assert worst_error(gradients(net), wanted) < RTOL


def test_what_happens_to_one_rank_is_told_to_the_other():
    run_checks(
        an_interrupt_before_the_vote,
        an_interrupt_after_the_vote_has_begun,
        a_program_that_ends_on_one_rank_and_errors_on_all,
        a_collective_that_the_program_has_begun,
        a_rank_that_comes_too_late,
    )


def early_weights(rank):
    """Weights that can't be had, while one rank has no samples, and in turn while it has."""
    parts, _, module, _ = replicated(3)

    def fn(b):
        return {"a": square(module, b), "b": square(module, b)}

    def failing(b):
        if rank == 1:
            raise ValueError("no labels")
        return 2

    for batch in (None if rank == 2 else parts[rank], parts[rank]):
        name, _ = told_by(lambda batch=batch: step(fn, batch, weight=lambda b: {"a": 2, "b": 3}))
        assert name == ("RemoteRankError" if batch is None else "AdaptiveUsageError")
        name, _ = told_by(lambda batch=batch: step(fn, batch, weight=failing))
        assert name == ("ValueError" if rank == 1 else "RemoteRankError")


def test_weights_that_can_not_be_had_are_an_error_on_all_also_without_samples():
    run_checks(early_weights, n=3)


def dying_on(rank, when):
    parts, net, module, _ = replicated(3)
    if rank == 2 and when == "in the exchange":
        dist.all_reduce = lambda *_, **how: os.kill(os.getpid(), signal.SIGKILL)

    def fn(b):
        if rank == 2 and when == "in the work":
            os.kill(os.getpid(), signal.SIGKILL)
        return square(module, b)

    told = r"Of 3 ranks rank 2 \(process .* has ended"
    with pytest.raises(RemoteRankError, match=told) as caught:
        step(fn, parts[rank])
    assert caught.value.rank == 2
    assert not gradients(net)
    return "told"


@pytest.mark.parametrize("when", ["in the work", "in the exchange"])
def test_a_rank_that_dies_is_an_error_on_the_others(when):
    # the barrier of the end would wait for the dead
    assert run_ranks(dying_on, 3, when=when, has_end=False) == ["told", "told", None]
