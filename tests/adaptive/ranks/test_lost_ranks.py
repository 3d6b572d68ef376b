"""Ranks that are interrupted, die, don't come, or come to another call: none waits for ever."""

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import find_batch_size, step

from ..step.step_cases import gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, Fails, all_samples, joined, net_of, square, wanted_of


def told_by(work):
    """What a call raises, and whether that has a note of the others."""
    try:
        work()
    except BaseException as error:
        return [type(error).__name__, str(error), getattr(error, "__notes__", [])]
    return [None, "", []]


# --- Ctrl-C


def interrupted_on(rank, when):
    """Ctrl-C on one rank, and then a step of all."""
    parts = all_samples(SIZES[:2])
    net = net_of()
    square(net, joined(parts)).backward()
    wanted = gradients(net)
    net.zero_grad()
    module = Replicated(net)
    plain, all_reduce = dist.ProcessGroupGloo, dist.all_reduce

    def interrupt(place):
        if rank and when == place:
            signal.raise_signal(signal.SIGINT)

    class Votes(plain):
        def send(self, *args):
            interrupt("in the vote")
            return super().send(*args)

    dist.ProcessGroupGloo = Votes
    dist.all_reduce = lambda *args, **how: interrupt("in the exchange") or all_reduce(*args, **how)

    def fn(b):
        interrupt("in the work")
        return square(module, b)

    told = told_by(lambda: step(fn, parts[rank]))
    when = None
    got = gradients(net)
    net.zero_grad()
    step(lambda b: square(module, b), parts[rank])
    after = worst_error(gradients(net), wanted)
    return told[:2], worst_error(got, wanted) if got else None, after


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in the work", "in the vote", "in the exchange"])
def test_an_interrupt_comes_before_the_vote_or_after_the_gradients(when):
    (other, other_error, other_after), (told, error, after) = run_ranks(interrupted_on, when=when)
    assert told[0] == "KeyboardInterrupt"
    assert max(after, other_after) < RTOL
    if when == "in the work":
        assert (error, other_error) == (None, None)
        assert other[0] == "RemoteRankError"
        assert "failed on rank 1 (KeyboardInterrupt) of 2 ranks" in other[1]
    else:
        assert other[0] is None
        assert max(error, other_error) < RTOL


class Interrupting(torch.nn.Module):
    """A module that is looked at when somebody presses Ctrl-C."""

    is_armed = False

    def __getattribute__(self, name):
        if name == "_modules" and self.is_armed:
            self.is_armed = False
            signal.raise_signal(signal.SIGINT)
        return super().__getattribute__(name)


def interrupted_in_the_search_on(rank, entry):
    """Ctrl-C on one rank while modules are looked for, and then a step of all."""
    seen, net, x = Interrupting(), net_of(), all_samples()[0]
    module = net if entry == "group" else Replicated(net)
    group = None if entry == "replica" else dist.group.WORLD

    def fn(b):
        return square(module, b) + 0 * seen.training

    seen.is_armed = bool(rank)
    if entry == "find_batch_size":
        told = told_by(lambda: find_batch_size(lambda n: seen and n, high=8, group=group))
    else:
        told = told_by(lambda: step(fn, x, group=group))
    is_clean = all(p.grad is None for p in net.parameters())
    handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step(fn, x, group=group)
    return told[:2], is_clean and handler


@pytest.mark.parametrize("entry", ["replica", "group", "find_batch_size"])
def test_an_interrupt_before_a_rank_can_vote_is_told_to_the_others(entry):
    (other, is_clean), (own, is_clean_here) = run_ranks(
        interrupted_in_the_search_on, entry=entry, timeout=20
    )
    assert (other[0], own[0]) == ("RemoteRankError", "KeyboardInterrupt")
    assert "failed on rank 1 (KeyboardInterrupt) of 2 ranks" in other[1]
    assert is_clean
    assert is_clean_here


def other_range_on(rank):
    return told_by(
        lambda: find_batch_size(print, low=9 if rank else 1, high=8, group=dist.group.WORLD)
    )


def test_an_argument_that_one_rank_refuses_is_told_to_the_others():
    (other, text, _), (own, _, _) = run_ranks(other_range_on, timeout=20)
    assert (other, own) == ("RemoteRankError", "AdaptiveUsageError")
    assert "low=9" in text


def exit_on(rank):
    module = Replicated(net_of())

    def fn(b):
        if rank:
            raise SystemExit(3)
        return square(module, b)

    return told_by(lambda: step(fn, all_samples()[0]))[:2]


def test_a_program_that_ends_on_one_rank_tells_the_others():
    (name, text), (own, _) = run_ranks(exit_on)
    assert (name, own) == ("RemoteRankError", "SystemExit")
    assert "rank 1 (SystemExit: 3)" in text


# --- ranks that die, or don't come


def dying_on(rank, when):
    parts = all_samples(SIZES[:3])
    net = net_of()
    module = Replicated(net)
    if rank == 2 and when == "in the exchange":
        dist.all_reduce = lambda *_, **how: os.kill(os.getpid(), signal.SIGKILL)

    def fn(b):
        if rank == 2 and when == "in the work":
            os.kill(os.getpid(), signal.SIGKILL)
        return square(module, b)

    told = told_by(lambda: step(fn, parts[rank]))
    return told, not gradients(net)


@pytest.mark.parametrize("when", ["in the work", "in the exchange"])
def test_a_rank_that_dies_is_an_error_on_the_others(when):
    # the barrier of the end would wait for the dead
    *others, dead = run_ranks(dying_on, 3, when=when, has_end=False)
    assert dead is None
    for (name, text, _), is_clean in others:
        assert name == "RemoteRankError"
        assert "Of 3 ranks rank 2 (process " in text
        assert is_clean


def absent_on(rank):
    """A rank that makes no call lets the group's timeout end those of the others."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    net = net_of()
    module = Replicated(net, process_group=group)
    told = None
    if rank == 0:
        told = told_by(lambda: step(lambda b: square(module, b), all_samples()[0]))
    dist.barrier()
    return told


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout_of_the_group():
    (name, text, _), _ = run_ranks(absent_on)
    assert name == "RemoteRankError"
    assert "did not come" in text


def late_on(rank):
    """One comes too late to a call, and then all come to others."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    net = net_of()
    parts = all_samples(SIZES[:2])
    told = []
    for i in range(3):
        if rank and i == 1:
            time.sleep(4)
        told.append(told_by(lambda: step(lambda b: square(net, b), parts[rank], group=group))[0])
        net.zero_grad() if i < 2 else None
    return told, worst_error(gradients(net), wanted_of(net, parts))


@pytest.mark.slow
def test_a_rank_that_comes_too_late_is_an_error_on_all_and_the_next_call_goes_well():
    for told, error in run_ranks(late_on):
        assert told == [None, "RemoteRankError", None]
        assert error < RTOL


# --- other calls


def elsewhere_on(rank, kind):
    parts = all_samples(SIZES[:2])
    net = net_of()
    other = net_of()
    module, second = Replicated(net), Replicated(torch.nn.Sequential(other, torch.nn.Identity()))

    def one(b):
        return square(module, b)

    def another(b):
        return square(second, b)

    calls = {
        "functions": lambda: step(another if rank else one, parts[rank]),
        "losses": lambda: step(one, parts[rank], loss="sum" if rank else "mean"),
        "kinds": lambda: step(one, parts[rank], per_rank=bool(rank)),
    }
    told = told_by(calls[kind])
    step(one, parts[rank])
    return told, not gradients(other)


@pytest.mark.parametrize("kind", ["functions", "losses", "kinds"])
def test_ranks_in_different_calls_find_it_out(kind):
    for told, is_clean in run_ranks(elsewhere_on, kind=kind):
        assert told[0] == "AdaptiveUsageError"
        assert "Ranks that work together are in different calls: step('one') (" in told[1]
        assert "on rank 0" in told[1]
        assert "on rank 1" in told[1]
        assert is_clean


def other_parameters_on(rank):
    """Layers of other sizes, which a replica would have found out as it was made."""
    net = torch.nn.Linear(4, 3 + rank).double()

    def fn(b):
        return square(net, b)

    told = told_by(lambda: step(fn, all_samples()[rank], group=dist.group.WORLD))
    return told, not gradients(net)


def test_ranks_with_other_parameters_are_told_so():
    for told, is_clean in run_ranks(other_parameters_on):
        assert told[0] == "AdaptiveUsageError"
        assert (
            "with parameters or buffers of other shapes or in another order: step('fn')" in told[1]
        )
        assert "(loss='mean'; 2 parameters) on rank 0, 1." in told[1]
        assert is_clean


def early_on(rank):
    """Weights that can't be had, while one rank has no samples, and in turn while it has."""
    parts = all_samples(SIZES[:3])
    net = net_of()
    module = Replicated(net)

    def fn(b):
        return {"a": square(module, b), "b": square(module, b)}

    def of_terms(b):
        return {"a": 2, "b": 3}

    def failing(b):
        if rank == 1:
            raise ValueError("no labels")
        return 2

    batches = [None if rank == 2 else parts[rank], parts[rank]]
    return [
        told_by(lambda weight=weight, batch=batch: step(fn, batch, weight=weight))[0]
        for weight in (of_terms, failing)
        for batch in batches
    ]


def test_weights_of_terms_and_weights_that_fail_are_an_error_on_all_also_without_samples():
    first, second, third = run_ranks(early_on, 3)
    assert first == ["AdaptiveUsageError"] * 2 + ["RemoteRankError"] * 2
    assert second == ["AdaptiveUsageError"] * 2 + ["ValueError"] * 2
    assert third == ["RemoteRankError", "AdaptiveUsageError", *["RemoteRankError"] * 2]


# --- in threads


def threads_on(rank):
    """A vote on a thread that gets no signals."""
    parts = all_samples(SIZES[:2])
    net = net_of()
    module = Replicated(net)
    done = []
    thread = threading.Thread(
        target=lambda: done.append(step(lambda b: square(module, b), parts[rank]).n_samples)
    )
    thread.start()
    while thread.is_alive():
        time.sleep(0.01)
    return done


def test_a_step_may_run_on_another_thread():
    assert run_ranks(threads_on) == [[sum(SIZES[:2])]] * 2


def all_fail_on(rank):
    module = Replicated(net_of())
    fails = Fails(0, ValueError if rank else TypeError)
    return told_by(lambda: step(lambda b: (fails(b["x"]), square(module, b))[1], all_samples()[0]))[
        0
    ]


def test_each_rank_raises_its_own_error_where_it_has_one():
    assert run_ranks(all_fail_on) == ["TypeError", "ValueError"]


def destroyed_on(rank):
    """A group that a step has used is gone when it was destroyed."""
    group = dist.new_group([0, 1])
    net = net_of()
    step(lambda b: square(net, b), all_samples()[rank], group=group)
    known = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return known() is None


def test_a_group_that_was_destroyed_is_not_kept():
    assert run_ranks(destroyed_on) == [True, True]
