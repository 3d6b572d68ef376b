"""A step of sharded modules: planned on all ranks, run once, with the gradients of all samples."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    OutOfRetriesError,
    RemoteRankError,
    memory_budget,
    step,
)

from .launch import run_ranks
from .sharded_nets import (
    KINDS,
    loss_of,
    net_of,
    sharded,
    tokens,
    wait_at_most,
    whole,
    whole_gradients,
)

SIZES = (9, 5)
RTOL = 1e-10
EXACT = [kind for kind in KINDS if kind != "half precision"]


def batch_of(rank, kind="plain"):
    # ranks that are parallel over tensors have the same samples
    return tokens(SIZES[0]) if kind == "tensor parallel" else tokens(SIZES[rank], seed=rank)


def all_samples(kind="plain"):
    if kind == "tensor parallel":
        return batch_of(0, kind)
    return torch.cat([batch_of(rank) for rank in range(len(SIZES))])


def wanted_of(loss_of_net, kind="plain"):
    """The loss and the gradients of one rank that has all."""
    net = whole(**KINDS[kind][2]).double()
    loss = loss_of_net(net)(all_samples(kind))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in net.named_parameters()}


def differs(net, wanted):
    """The largest difference, beside the largest gradient."""
    found, worst = whole_gradients(net), 0.0
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), 1e-6)
        worst = max(worst, float((found[name] - gradient).abs().max()) / scale)
    return worst


def mean(net):
    # not in half precision: 64 bits are compared
    def fn(x):
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    return fn


# --- gradients


def exact(rank, kind):
    net, found = net_of(kind, torch.float64), []
    loss, wanted = wanted_of(mean, kind)
    x = batch_of(rank, kind)
    for maximum in (4, 9, 4):
        net.zero_grad()
        result = step(mean(net), x, maximum=maximum)
        sums = abs(float(result.loss) - loss) < 1e-12
        found.append([list(result.sizes), differs(net, wanted), sums, result.n_samples])
    # added to what was there, and a plain pass works on
    step(mean(net), x)
    found.append(differs(net, {name: 2 * gradient for name, gradient in wanted.items()}))
    net.zero_grad()
    mean(net)(x).backward()
    return found


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("plain", "tensor parallel") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in EXACT
    ],
)
def test_all_ranks_get_the_gradients_of_all_samples(kind):
    is_alike = kind == "tensor parallel"
    for rank, (*found, added) in enumerate(run_ranks(exact, 2, timeout=180, kind=kind)):
        n = 9 if is_alike else SIZES[rank]
        for (sizes, error, is_loss, n_samples), n_parts in zip(found, (3, 1, 3), strict=True):
            assert len(sizes) == n_parts
            assert sum(sizes) == n
            assert max(sizes) <= -(-9 // n_parts)
            assert error < RTOL
            assert is_loss
            assert n_samples == (18 if is_alike else 14)
        assert added < RTOL


def n_known(x):
    return (x > 20).sum()


def other_losses(rank):
    x, found = batch_of(rank), []

    def ignoring(net):
        def fn(x):
            y = x.flatten().where(x.flatten() > 20, -100)
            return F.cross_entropy(net(x).flatten(0, 1), y)

        return fn

    def summed(net):
        return lambda x: F.cross_entropy(net(x).flatten(0, 1), x.flatten(), reduction="sum")

    cases = (
        (ignoring, ignoring, {"weight": n_known}),
        (summed, summed, {"loss": "sum"}),
    )
    for of_all, own, options in cases:
        loss, wanted = wanted_of(of_all)
        net = sharded(whole().double())
        result = step(own(net), x, maximum=4, **options)
        found.append([differs(net, wanted), abs(float(result.loss) - loss)])
    return found


@pytest.mark.slow
def test_other_losses_are_exact_too():
    for found in run_ranks(other_losses, 2, timeout=180):
        for error, of_loss in found:
            assert error < RTOL
            assert of_loss < 1e-10


# --- sizes


def planned(rank):
    """Under half of what the whole takes, and on one rank less: the sizes, and how often it ran."""
    net, n = sharded(whole()), 32
    x, ran = tokens(n, seed=rank), []

    def fn(x):
        if not isinstance(x, FakeTensor):
            ran.append(len(x))
        return loss_of(net)(x)

    with memory_budget("1GiB") as budget:
        fn(x).backward()
    net.zero_grad()
    ran.clear()
    found = []
    for _ in range(3):
        # a thread of gloo lets go of a gathered weight late where the machine is busy
        with memory_budget(int(budget.peak_bytes * (0.5, 0.38)[rank])) as limited:
            result = step(fn, x)
        found.append([result.micro_batch, result.attempts, ran[:]])
        found[-1].append(limited.peak_bytes)
        ran.clear()
    return found


@pytest.mark.slow
def test_sizes_are_planned_by_the_rank_that_has_the_least_memory():
    first, second = run_ranks(planned, 2, timeout=180)
    for (size, attempts, ran, _), (other, others, also, _) in zip(first, second, strict=True):
        assert size == other < 32
        assert attempts == others == 1
        assert ran == also
        assert sum(ran) == 32
    # what fitted is remembered
    assert len({size for size, *_ in first}) == 1


def few_samples(rank):
    net = sharded(whole())
    found = []
    for x in (tokens((9, 2)[rank]), None if rank else tokens(9), tokens(4)):
        try:
            step(loss_of(net), x, maximum=4)
        except (AdaptiveUsageError, RemoteRankError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_with_too_few_samples_are_refused_on_all():
    first, second = run_ranks(few_samples, 2)
    assert first[0] == second[0]
    assert "has to be split into 3 micro-batches on every rank" in first[0]
    assert "one rank has 2 samples" in first[0]
    assert "RemoteRankError" in first[1]
    assert "got no samples on rank 1" in first[1]
    assert "AdaptiveUsageError: step() got no samples on rank 1" in second[1]
    assert len(first) == len(second) == 2


# --- failures


def fails_everywhere(rank):
    """Runs out of memory above 4 samples, which nobody has predicted; then the next step."""
    net = sharded(whole().double())
    _, wanted = wanted_of(mean)
    x = batch_of(rank)

    def fn(x):
        out = net(x)
        if not isinstance(x, FakeTensor) and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

    found = []
    for _ in range(2):
        with memory_budget("1GiB"):
            try:
                result = step(fn, x)
            except (OutOfRetriesError, RemoteRankError) as error:
                found.append(f"{type(error).__name__}: {error}")
                found.append(all(p.grad is None for p in net.parameters()))
            else:
                return [*found, list(result.sizes), differs(net, wanted)]
    return found


@pytest.mark.slow
def test_the_step_after_one_that_ran_out_plans_for_less():
    first, second = run_ranks(fails_everywhere, 2, timeout=120)
    for text, is_clean, _, error in (first, second):
        assert text.startswith("OutOfRetriesError: 'fn' ran out of")
        assert "predicted were " in text
        assert "that were free of cpu" in text
        assert is_clean
        assert error < RTOL
    assert "on rank 0, in micro-batches of 9 (wanted 1.0 GiB more)" in first[0]
    assert "on rank 1, in micro-batches of 5" in second[0]
    assert max(first[2]) <= 4
    assert len(first[2]) == len(second[2])


def fails_at_the_end(rank):
    """After all passes, on one rank: nothing is delivered on either, and the next step goes on."""
    net = sharded(whole().double())
    _, wanted = wanted_of(mean)
    x, n_passes = batch_of(rank), []

    def backward(loss):
        loss.backward()
        n_passes.append(loss)
        if rank and len(n_passes) == 3:
            raise ValueError("no penalty")

    try:
        step(mean(net), x, maximum=4, backward=backward)
        said = "nothing"
    except (ValueError, RemoteRankError) as error:
        said = f"{type(error).__name__}: {error}"
    is_clean = all(p.grad is None for p in net.parameters())
    step(mean(net), x, maximum=4)
    return said, is_clean, differs(net, wanted)


def test_a_failure_after_the_passes_undoes_the_step_on_all():
    first, second = run_ranks(fails_at_the_end, 2)
    assert first[0].startswith("RemoteRankError: step('fn')")
    assert "rank 1 (ValueError: no penalty)" in first[0]
    assert second[0] == "ValueError: no penalty"
    for _, is_clean, error in (first, second):
        assert is_clean
        assert error < RTOL


def fails_alone(rank, folder):
    """On one rank in the middle of a forward pass: the other waits in the next one."""
    wait_at_most(1.0)
    net = sharded(whole())

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    if rank:
        net.blocks[1].narrow.register_forward_hook(fail)
    started = time.monotonic()
    try:
        step(loss_of(net), tokens(4), maximum=4)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    answer = {"said": said, "seconds": time.monotonic() - started}
    Path(folder, f"answer{rank}").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_hears_of_it_when_that_ends(tmp_path):
    run_ranks(fails_alone, 2, folder=str(tmp_path))
    waiting, failed = (json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2))
    assert failed["said"].startswith("OutOfRetriesError")
    assert "The other ranks could not be told of it" in failed["said"]
    assert waiting["said"].startswith("RemoteRankError: One of 2 ranks has died")


# --- what is known too late


def late_on(rank):
    kind = next(iter(EXACT))
    net, x = net_of(kind, torch.float64), batch_of(rank, kind)

    def counted(b):
        each = F.cross_entropy(net(b).flatten(0, 1), b.flatten(), reduction="none")
        return each.sum(), each.numel()

    try:
        step(counted, x, per_rank=True, maximum=3)
    except AdaptiveUsageError as error:
        return str(error), all(p.grad is None for p in net.parameters())
    return None


def test_a_factor_that_comes_after_the_exchange_is_refused():
    for text, is_untouched in run_ranks(late_on, 2, timeout=60):
        assert "sharded modules have exchanged gradients by then" in text
        assert is_untouched


def root_on(rank):
    plain = whole().double()
    (sum(mean(plain)(batch_of(each)).sqrt() for each in range(2)) / 2).backward()
    net = sharded(whole().double())
    step(mean(net), batch_of(rank), then=torch.sqrt, per_rank=True, maximum=3)
    return differs(net, {name: p.grad for name, p in plain.named_parameters()})


def test_a_function_of_the_mean_of_each_rank_takes_two_passes():
    assert max(run_ranks(root_on, 2)) < RTOL
