"""A step on several ranks: gradients, buffers and losses are those of all samples."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tenure.adaptive import check_split, memory_budget, plan, predict_peak, reset, step

from ..step.step_cases import IGNORED, N_CLASSES, gradients, n_valid, worst_error
from ..step.step_cases import wanted_of as plain_gradients
from ..unchanged import unchanged
from .launch import run_checks, run_ranks
from .rank_cases import (
    RTOL,
    SIZES,
    Fails,
    all_samples,
    joined,
    net_of,
    replicated,
    square,
    squares,
    wanted_of,
)


def is_alike(tensor):
    """Whether a tensor is the same on all ranks, to the bit."""
    everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor.contiguous())
    return all(torch.equal(each, tensor) for each in everywhere)


def assert_same(found, wanted):
    assert worst_error(found, wanted) < RTOL


def ce(net, b, reduction="mean"):
    return F.cross_entropy(net(b["x"]), b["y"], ignore_index=IGNORED, reduction=reduction)


# the loss of all samples, the function that a rank has for it, and its options
LOSSES = {
    "mean": (square, square, {}),
    "sum": (lambda net, b: net(b["x"]).square().sum(),) * 2 + ({"loss": "sum"},),
    "weight": (ce, ce, {"weight": n_valid}),
    "pair": (ce, lambda net, b: (ce(net, b, "sum"), n_valid(b)), {}),
    "terms": (
        lambda net, b: net(b["x"]).square().mean() + net(b["x"]).abs().mean(),
        lambda net, b: {"a": net(b["x"]).square().mean(), "b": net(b["x"]).abs().mean()},
        {},
    ),
}


# --- losses


def losses(rank):
    """Some ranks split, one has no samples; with a replica, and with a named group."""
    parts = all_samples(SIZES[:3])
    for name, (whole_loss, fn, options) in LOSSES.items():
        for idle, most, once in (
            (None, (None, 3, None), False),
            (0, (None, None, 4), True),
            (2, (2, 3, None), True),
        ):
            net, there = net_of(), [part for i, part in enumerate(parts) if i != idle]
            extra = (lambda net=net: net[0].weight.square().sum()) if once else None
            whole = whole_loss(net, joined(there)) + (extra() if once else 0)
            wanted = plain_gradients(net, whole)
            for module in (Replicated(net), net):
                reset()
                net.zero_grad()
                group = dist.group.WORLD if module is net else None
                batch = None if rank == idle else parts[rank]
                failing = Fails(partial(fn, module), most[rank])
                result = step(failing, batch, group=group, once=extra, **options)
                assert_same(gradients(net), wanted)
                assert_same({name: result.loss}, {name: whole.detach()})
                assert once or abs(sum(result.terms.values()) - whole) < RTOL * whole
                assert result.n_samples == sum(len(part["x"]) for part in there)
                if most[rank]:
                    assert max(result.sizes) <= most[rank]
                else:
                    assert result.sizes == (() if rank == idle else (SIZES[rank],))


def losses_of_each_rank(rank):
    """Averaged as DDP does."""
    parts, net, module, _ = replicated()
    for fn, options in (
        (squares(module), {}),
        (squares(module), {"then": torch.sqrt}),
        (lambda b: module(b["x"]), {"loss": lambda out: out.logsumexp(0).sum()}),
    ):
        net.zero_grad()
        loss = options.get("then", options.get("loss", lambda each: each))(fn(parts[rank]))
        wanted, failing = plain_gradients(net, loss), Fails(fn, 3 if rank else None)
        result = step(failing, parts[rank], per_rank=True, **options)
        assert_same(gradients(net), wanted)
        assert abs(float(result.loss - loss.detach())) < RTOL


def other_arguments(rank):
    parts, net, module, wanted = replicated()
    seen = []
    for factor, options in (
        (8.0, {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}),
        (0.25, {"backward": lambda loss: (loss / 4).backward()}),
    ):
        net.zero_grad()
        step(squares(module), parts[rank], maximum=4, **options)
        assert_same(gradients(net), {key: value * factor for key, value in wanted.items()})
    net.zero_grad()
    net[0].weight.register_hook(seen.append)
    result = step(lambda b: (square(module, b), len(b["x"])), parts[rank], maximum=4, has_aux=True)
    assert len(seen) == 1
    assert result.aux == result.sizes
    assert sum(result.sizes) == SIZES[rank]


def tensors_that_are_no_parameters(rank):
    """They are exchanged by nobody, or by a named group."""
    parts, net, replica, _ = replicated()
    temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def fn(run, b):
        return (run(b["x"]) * temperature).square().mean()

    whole = joined(parts)
    whole["x"].requires_grad_()
    wanted = plain_gradients(net, fn(net, whole))
    wanted["inputs"] = 2 * whole["x"].grad.split(SIZES[:2])[rank]
    wanted["temperature"] = temperature.grad
    for module in (replica, net):
        net.zero_grad()
        temperature.grad = None
        group = dist.group.WORLD if module is net else None
        batch = {**parts[rank], "x": parts[rank]["x"].clone().requires_grad_()}
        step(lambda b, module=module: fn(module, b), batch, maximum=4, group=group)
        got = temperature.grad.clone()
        if module is not net:
            dist.all_reduce(got)
            got /= 2
        assert_same({**gradients(net), "inputs": batch["x"].grad, "temperature": got}, wanted)


def an_error_on_one_rank(rank):
    """It is one on all, and leaves them whole; then all make a step, and a plain one."""
    for kind, name in ((torch.OutOfMemoryError, "OutOfRetriesError"), (ValueError, "ValueError")):
        parts, net, module, _ = replicated(kind="buffers")
        fn = Fails(squares(module), 0 if rank else None, kind)
        with unchanged(net), pytest.raises(Exception, match=r"\w") as caught:
            step(fn, parts[rank], batchnorm="per_chunk")
        told = str(caught.value)
        if rank:
            assert type(caught.value).__name__ == name
        else:
            assert (type(caught.value).__name__, caught.value.rank) == ("RemoteRankError", 1)
            assert f"{name}: " in told
            assert "gradients, buffers and random state are as before" in told
        fn.most = None
        for run in (step, lambda fn, b: fn(b).backward()):
            net.zero_grad()
            run(fn, parts[0])
            alone = net_of("buffers")
            assert_same(gradients(net), wanted_of(alone, parts[:1]))


def a_budget_on_one_rank(rank):
    """A real shortage: failures, trials, verification, and all of it taken back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Dropout(0.0), nn.Linear(256, 2)).double()
    x = torch.randn(600, 16, dtype=torch.float64)
    wanted = plain_gradients(net, net(x).square().mean())
    module, attempts = Replicated(net), []
    for _ in range(3):
        net.zero_grad()
        with memory_budget("1MiB" if rank else "1GiB"):
            result = step(lambda b: module(b).square().mean(), x[:500] if rank else x[500:])
        assert_same(gradients(net), wanted)
        assert (len(result.sizes) > 1) is bool(rank)
        attempts.append(result.attempts)
    # known from then on
    assert attempts[-1] == 1
    assert (attempts[0] > 1) is bool(rank)


def planned(fn, b):
    return plan(fn, b, "1GiB").micro_batch == len(b["x"])


def asked_by_one_rank_alone(rank):
    """After a plain step, which finds the order of buckets, and before the next tells all ranks."""
    for ask in (check_split, predict_peak, planned):
        parts, net, module, wanted = replicated(find_unused_parameters=True)
        fn = squares(module)
        fn(parts[rank]).backward()
        module.zero_grad()
        assert rank or ask(fn, parts[rank])
        step(fn, parts[rank])
        assert_same(gradients(net), wanted)
        module.zero_grad()
        fn(parts[rank]).backward()
        assert all(map(is_alike, gradients(net).values()))


def test_two_ranks_get_the_losses_and_gradients_of_all_samples():
    run_checks(
        losses_of_each_rank, other_arguments, tensors_that_are_no_parameters, an_error_on_one_rank,
        a_budget_on_one_rank, asked_by_one_rank_alone,
    )  # fmt: skip


# --- parameters that are not used, gradients of before, views of buckets


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.one, self.none = (nn.Linear(4, N_CLASSES).double() for _ in range(3))

    def forward(self, x, takes_one):
        out = self.used(x)
        return out + self.one(x) if takes_one else out


def parameters_that_are_not_used(rank):
    """Nor in a plain pass that follows, nor where no_sync has used them before."""
    x, got = all_samples(SIZES[:2])[0]["x"], {True: [], False: []}
    for is_plain in (True, False):
        net = Branches()
        module = Replicated(net, find_unused_parameters=True, gradient_as_bucket_view=True)

        def fn(b, takes_one=True, module=module):
            return module(b, takes_one and rank == 1).square().mean()

        for maximum in (9, 4, 9):
            fn(x).backward() if is_plain else step(fn, x, maximum=maximum)
        got[is_plain].append(gradients(net))
        net.zero_grad()
        module(x, False).square().mean().backward()
        got[is_plain].append(gradients(net))
        net.zero_grad()
        with module.no_sync():
            fn(x).backward()
        unused = partial(fn, takes_one=False)
        unused(x).backward() if is_plain else step(unused, x)
        got[is_plain].append(gradients(net))
        assert is_alike(net.one.weight.grad)
    both, one = {"used.weight", "used.bias"}, {"one.weight", "one.bias"}
    assert [each.keys() for each in got[True]] == [both | one, both, both | one]
    for one, other in zip(got[True], got[False], strict=True):
        assert_same(other, one)


def gradients_of_before(rank):
    """They are averaged with the new ones, as by a plain replica."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        parts, net, module, wanted = replicated(**options)
        for before in ("exchanged", "waiting", "of one rank"):
            net.zero_grad()
            if before != "of one rank" or rank:
                with nullcontext() if before == "exchanged" else module.no_sync():
                    square(module, parts[rank]).backward()
            olds = {
                name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
                for name, p in net.named_parameters()
            }
            for old in olds.values():
                dist.all_reduce(old)
            step(squares(module), parts[rank], maximum=4)
            assert_same(gradients(net), {name: wanted[name] + olds[name] / 2 for name in wanted})
            # and what a step has left is in the next exchange of a plain pass
            left, alone = gradients(net), wanted_of(net_of(), parts[:1])
            square(module, parts[0]).backward()
            assert_same(gradients(net), {name: left[name] + alone[name] for name in alone})


def steps_in_no_sync(rank):
    """They exchange nothing, and the last one all of it."""
    parts, net = [all_samples(SIZES[i : i + 2]) for i in range(3)], net_of()
    module, wanted = Replicated(net), [wanted_of(net, each) for each in parts]
    for i, each in enumerate(parts):
        with module.no_sync() if i < 2 else nullcontext():
            step(squares(module), each[rank], maximum=3 + rank)
            # plain passes of the block exchange nothing either
            assert module.require_backward_grad_sync is (i == 2)
        assert is_alike(net[0].weight.grad) is (i == 2)
    assert_same(gradients(net), {name: sum(each[name] for each in wanted) for name in wanted[0]})


def buckets_that_wait_for_their_order(rank):
    """After the first plain pass of a replica all ranks talk, to put buckets into order."""
    parts, net, module, wanted = replicated(bucket_cap_mb=1e-4)
    square(module, parts[rank]).backward()
    net.zero_grad()
    with pytest.raises((ValueError, RuntimeError)):
        step(Fails(squares(module), 0 if rank else None, ValueError), parts[rank])
    step(squares(module), parts[rank])
    assert_same(gradients(net), wanted)
    net.zero_grad()
    square(module, parts[0]).backward()
    assert_same(gradients(net), wanted_of(net_of(), parts[:1]))


def large_and_small_gradients_of_two_types(rank):
    """Those that go as they are, and those that fill more than one buffer together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 300), nn.Linear(300, 5)).double()
    net[2].float()
    net.scales = nn.ParameterList(torch.ones(n) for n in [900_000] * 7 + [600_000] * 2 + [3])
    assert net[1].weight.nbytes > 4 * 2**20

    def fn(b):
        out = net[2](net[1](net[0](b["x"])).float())
        return out.square().mean() + sum(out.square().mean() * each.mean() for each in net.scales)

    parts = all_samples(SIZES[:2])
    wanted = plain_gradients(net, fn(joined(parts)))
    # one gradient in another order of memory
    net[1].weight.register_hook(lambda g: g.t().contiguous().t() if rank else g)
    step(fn, parts[rank], maximum=8, group=dist.group.WORLD)
    assert worst_error(gradients(net), wanted) < 1e-5


def test_two_ranks_keep_what_replicas_have_besides():
    run_checks(
        parameters_that_are_not_used, gradients_of_before, steps_in_no_sync,
        buckets_that_wait_for_their_order, large_and_small_gradients_of_two_types,
    )  # fmt: skip


# --- ranks without samples, and samples that weigh nothing


def ranks_that_run_out_of_batches(rank):
    """One after the other; the parameters stay those of one process."""
    n_batches, (a, b, c) = (1, 3, 2), SIZES[:3]
    net, alone = net_of("buffers"), net_of("buffers")
    alone[1].eval()
    net[1].eval()
    fn = Fails(squares(Replicated(net)), 3 if rank == 1 else None)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, alone)]
    for i, n_samples in enumerate([a + b + c, b + c, b, 0]):
        parts = all_samples(SIZES[:3])
        nothing = {key: value[:0] for key, value in parts[0].items()} if rank else None
        result = step(fn, parts[rank] if i < n_batches[rank] else nothing)
        assert result.n_samples == n_samples
        if not n_samples:
            break
        there = [part for part, n in zip(parts, n_batches, strict=True) if i < n]
        whole = square(alone, joined(there))
        whole.backward()
        assert abs(float(result.loss) - float(whole)) < RTOL
        assert_same(gradients(net), gradients(alone))
        for each in sgd:
            each.step()
            each.zero_grad()
    assert not gradients(net)
    assert result.sizes == ()
    assert_same(dict(net.named_parameters()), dict(alone.named_parameters()))
    assert all(map(is_alike, net.parameters()))


def samples_that_weigh_nothing(rank):
    """On all ranks, on some, on all that have samples: what one process gets, 0 / 0 too."""
    for ignored, idle in (((0, 1, 2), None), ((0, 1), None), ((0, 1, 2), 1)):
        for name in ("weight", "pair"):
            parts = all_samples(SIZES[:3])
            for each in ignored:
                parts[each]["y"][:] = IGNORED
            _, fn, options = LOSSES[name]
            there = [part for i, part in enumerate(parts) if i != idle]
            found = []
            for run, batch in (
                (net_of(), joined(there)),
                (Replicated(net_of()), None if rank == idle else parts[rank]),
            ):
                result = step(partial(fn, run), batch, maximum=4, **options)
                found.append([result.loss, *gradients(run).values()])
            torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12, equal_nan=True)


def buffers_of_the_first_rank_that_has_samples(rank):
    parts = all_samples(SIZES[:3])
    for idle in (None, 0):
        net, alone = net_of("buffers"), net_of("buffers")
        module = Replicated(net)
        batch = None if rank == idle else parts[rank]
        step(lambda b, module=module: square(module, b), batch)
        alone(parts[0 if idle is None else 1]["x"])
        assert torch.equal(net[1].running_mean, alone[1].running_mean)
    # a plain pass asks for the buffers of the first, as ever
    net[1].running_mean.fill_(rank)
    square(module, parts[rank]).backward()
    assert is_alike(net[1].num_batches_tracked)


def a_group_of_some_ranks(rank):
    some, net = dist.new_group([0, 2]), net_of()
    if rank != 1:
        for _ in range(2):
            result = step(squares(net), all_samples(SIZES[:3])[rank], group=some)
            assert result.n_samples == SIZES[0] + SIZES[2]


def test_three_ranks_may_be_without_samples_or_weight():
    run_checks(
        ranks_that_run_out_of_batches, losses, samples_that_weigh_nothing,
        buffers_of_the_first_rank_that_has_samples, a_group_of_some_ranks, n=3,
    )  # fmt: skip


def voted_on(rank):
    """The loss of all to the last bit, and their samples."""
    weight, group = torch.ones(4, dtype=torch.float64, requires_grad=True), dist.group.WORLD
    torch.manual_seed(rank)
    x = torch.randn(rank + 1, 4, dtype=torch.float64) * 1e16 ** (-1) ** rank
    result = step(lambda b: (b * weight).square().sum(1).mean(), x, group=group)
    return result.loss.item().hex(), result.n_samples


def test_a_vote_is_the_same_on_all_ranks_to_the_bit():
    first, *others = run_ranks(voted_on, 5)
    assert others == [first] * 4
    assert first[1] == 15


# --- each allocation of a step fails once


class Failing(TorchDispatchMode):
    """Lets the n-th allocation of a block fail; 0 counts."""

    def __init__(self, n):
        super().__init__()
        self.n, self.n_seen = n, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        there = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        if any(each.untyped_storage()._cdata not in there for each in tensors(out)):
            self.n_seen += 1
            if self.n_seen == self.n:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return out


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def swept(rank):
    """All have samples; one has none; a sum, and the first has none."""
    for idle, loss, victims in ((None, "mean", (0, 3)), (2, "mean", (2, 1)), (0, "sum", (0,))):
        parts = all_samples()
        batch = None if rank == idle else parts[rank]
        reduce = torch.sum if loss == "sum" else torch.mean
        net = net_of()
        whole = joined([part for i, part in enumerate(parts) if i != idle])
        # a gradient of before, of which half waits for an exchange
        wanted = plain_gradients(net, reduce(net(whole["x"]).square()))
        wanted["0.bias"] += sum(range(4)) / 4
        module = Replicated(net)

        def fn(b, module=module, reduce=reduce):
            return reduce(module(b["x"]).square())

        for victim in victims:
            for n in itertools.count(1):
                reset()
                net.zero_grad()
                net[0].bias.grad = torch.ones_like(net[0].bias) * rank
                with Failing(n if rank == victim else 0) as failing:
                    step(fn, batch, loss=loss)
                assert_same(gradients(net), wanted)
                # whether the victim has met its failure
                met = torch.tensor(int(failing.n_seen >= n and rank == victim))
                dist.all_reduce(met)
                if not met:
                    break
            assert n >= 8


@pytest.mark.slow
def test_ranks_finish_with_exact_gradients_whichever_allocation_fails():
    run_checks(swept, n=4, timeout=400)
