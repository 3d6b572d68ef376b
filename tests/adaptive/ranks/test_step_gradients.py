"""What becomes of gradients, buffers and parameters of each kind in a step of several ranks."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import step
from tests.needs import needs_torch

from ..step.step_cases import N_CLASSES, gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, Fails, all_samples, joined, net_of, square, wanted_of


def is_alike(tensor):
    """Whether a tensor is the same on all ranks, to the bit."""
    everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor.contiguous())
    return all(torch.equal(each, tensor) for each in everywhere)


# --- ranks without samples


def uneven_on(rank, is_empty):
    """Ranks run out of batches one after the other; the parameters stay those of one process."""
    n_batches = (1, 3, 2)[rank]
    net, alone = net_of("buffers"), net_of("buffers")
    alone[1].eval()
    net[1].eval()
    module = Replicated(net)
    fails = Fails(3 if rank == 1 else None)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, alone)]

    def fn(b):
        fails(b["x"])
        return square(module, b)

    counts = []
    for i in range(4):
        parts = all_samples(SIZES[:3])
        nothing = {key: value[:0] for key, value in parts[0].items()} if is_empty else None
        result = step(fn, parts[rank] if i < n_batches else nothing)
        counts.append(result.n_samples)
        if i == 3:
            assert all(p.grad is None for p in net.parameters())
            assert result.sizes == ()
            break
        there = [part for part, n in zip(parts, (1, 3, 2), strict=True) if i < n]
        whole = square(alone, joined(there))
        whole.backward()
        assert abs(float(result.loss) - float(whole)) < RTOL
        assert worst_error(gradients(net), gradients(alone)) < RTOL
        for each in sgd:
            each.step()
            each.zero_grad()
    apart = [
        float((a - b).abs().max())
        for a, b in zip(net.parameters(), alone.parameters(), strict=True)
    ]
    return {"counts": counts, "apart": max(apart), "alike": all(map(is_alike, net.parameters()))}


@pytest.mark.parametrize("is_empty", [False, True], ids=["None", "no rows"])
def test_ranks_without_samples_get_the_gradients_of_the_others(is_empty):
    a, b, c = SIZES[:3]
    for found in run_ranks(uneven_on, 3, is_empty=is_empty):
        assert found["counts"] == [a + b + c, b + c, b, 0]
        assert found["apart"] < RTOL
        assert found["alike"]


def idle_kinds_on(rank):
    """A rank without samples, whatever the others say of their loss."""
    from .test_step_ranks import LOSSES

    parts = all_samples(SIZES[:3])
    errors = {}
    for name, (plain, fn, options) in LOSSES.items():
        for idle in (0, 2):
            net = net_of()
            extra = net[2].weight.square
            there = [part for i, part in enumerate(parts) if i != idle]
            whole = plain(net, joined(there)) + extra().sum()
            whole.backward()
            wanted = gradients(net)
            net.zero_grad()
            module = Replicated(net)
            result = step(
                lambda b, fn=fn or plain, module=module: fn(module, b),
                None if rank == idle else parts[rank],
                once=lambda extra=extra: extra().sum(),
                **options,
            )
            loss_error = abs(float(result.loss) - float(whole)) / float(whole)
            errors[f"{name} {idle}"] = max(worst_error(gradients(net), wanted), loss_error)
    return errors


def test_each_kind_of_loss_lets_a_rank_be_without_samples():
    for found in run_ranks(idle_kinds_on, 3):
        assert {name: error for name, error in found.items() if not error < RTOL} == {}


# --- buffers


def buffers_on(rank):
    found = {}
    for name, idle in (("all have samples", None), ("the first has none", 0)):
        net, alone = net_of("buffers"), net_of("buffers")
        module = Replicated(net)
        parts = all_samples(SIZES[:3])
        batch = None if rank == idle else parts[rank]
        step(lambda b, module=module: square(module, b), batch)
        alone(parts[0 if idle is None else 1]["x"])
        found[name] = torch.equal(net[1].running_mean, alone[1].running_mean)
    # a plain pass asks for the buffers of the first, as ever
    net[1].running_mean.fill_(rank)
    square(module, parts[rank]).backward()
    found["brought by a plain pass"] = is_alike(net[1].num_batches_tracked)
    return found


def test_buffers_become_those_of_the_first_rank_that_has_samples():
    for found in run_ranks(buffers_on, 3):
        assert all(found.values()), found


def own_buffers_on(rank):
    net = net_of("buffers")
    module = Replicated(net, forward_sync_buffers=False)
    step(lambda b: square(module, b), all_samples(SIZES[:3])[rank])
    return is_alike(net[1].running_mean)


@needs_torch("2.13", "forward_sync_buffers of DistributedDataParallel")
def test_buffers_that_replicas_do_not_share_stay_their_own():
    assert run_ranks(own_buffers_on, 3) == [False] * 3


# --- parameters that are not used, gradients of before, views of buckets


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.one, self.none = (nn.Linear(4, N_CLASSES).double() for _ in range(3))

    def forward(self, x, takes_one):
        out = self.used(x)
        return out + self.one(x) if takes_one else out


def unused_on(rank):
    part = all_samples(SIZES[:2])
    found = []
    for options in ({}, {"gradient_as_bucket_view": True}):
        got = []
        for is_plain in (True, False):
            net = Branches()
            module = Replicated(net, find_unused_parameters=True, **options)

            def fn(b, module=module):
                return module(b, rank == 1).square().mean()

            x = part[0]["x"]
            for maximum in (9, 4, 9):
                fn(x).backward() if is_plain else step(fn, x, maximum=maximum)
            got.append(gradients(net))
            # nothing of what was used stays behind: a plain pass without it leaves it alone
            net.zero_grad()
            module(x, False).square().mean().backward()
            got.append(gradients(net))
        assert (
            got[0].keys() == got[2].keys() == {"used.weight", "used.bias", "one.weight", "one.bias"}
        )
        error = worst_error(got[3], got[1])
        found.append((worst_error(got[2], got[0]), sorted(got[1]), sorted(got[3]), error))
    return found


def test_parameters_that_no_rank_uses_stay_without_gradient():
    for found in run_ranks(unused_on):
        for step_error, keys, other_keys, error in found:
            assert step_error < RTOL
            assert keys == other_keys == ["used.bias", "used.weight"]
            assert error < RTOL


def old_on(rank):
    """Gradients of before are averaged with the new ones, as by a plain replica."""
    parts = all_samples(SIZES[:2])
    errors = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        net = net_of()
        wanted = wanted_of(net, parts)
        module = Replicated(net, **options)
        for before in ("exchanged", "waiting", "of one rank"):
            net.zero_grad()
            if before != "of one rank" or rank:
                waits = nullcontext() if before == "exchanged" else module.no_sync()
                with waits:
                    square(module, parts[rank]).backward()
            olds = {
                name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
                for name, p in net.named_parameters()
            }
            for old in olds.values():
                dist.all_reduce(old)
            kept = [p.grad for p in net.parameters()]
            step(lambda b, module=module: square(module, b), parts[rank], maximum=4)
            total = {name: wanted[name] + olds[name] / 2 for name in wanted}
            errors.append(worst_error(gradients(net), total))
            same = [a is b for a, b in zip(kept, (p.grad for p in net.parameters()), strict=True)]
            assert all(same) or None in kept or "gradient_as_bucket_view" in options
            # and what a step has left is in the next exchange of a plain pass
            before_it = gradients(net)
            square(module, parts[0]).backward()
            alone = net_of()
            square(alone, parts[0]).backward()
            sums = {name: before_it[name] + p.grad for name, p in alone.named_parameters()}
            errors.append(worst_error(gradients(net), sums))
    return errors


def test_gradients_of_before_are_averaged_as_a_plain_replica_does():
    for found in run_ranks(old_on):
        assert max(found) < RTOL


def used_before_on(rank):
    """What a plain pass in no_sync() has used, and this step does not, is exchanged, too."""
    x = all_samples(SIZES[:2])[0]["x"]
    got = []
    for is_plain in (True, False):
        net = Branches()
        module = Replicated(net, find_unused_parameters=True)
        with module.no_sync():
            module(x, rank == 1).square().mean().backward()

        def fn(b, module=module):
            return module(b, False).square().mean()

        fn(x).backward() if is_plain else step(fn, x)
        got.append(gradients(net))
    return worst_error(got[1], got[0]), is_alike(net.one.weight.grad)


def test_what_was_used_without_exchange_before_is_exchanged():
    for error, alike in run_ranks(used_before_on):
        assert error < RTOL
        assert alike


def accumulated_on(rank):
    """Steps in no_sync() exchange nothing, and the last one all of it."""
    parts = [all_samples(SIZES[i : i + 2]) for i in range(3)]
    net = net_of()
    module = Replicated(net)
    wanted = [wanted_of(net, each) for each in parts]
    for i, each in enumerate(parts):
        with module.no_sync() if i < 2 else nullcontext():
            step(lambda b: square(module, b), each[rank], maximum=3 + rank)
        if i < 2:
            assert not is_alike(net[0].weight.grad)
    sums = {name: sum(each[name] for each in wanted) for name in wanted[0]}
    return worst_error(gradients(net), sums)


def test_steps_in_no_sync_are_exchanged_by_the_last():
    assert max(run_ranks(accumulated_on)) < RTOL


# --- a replica that begins with plain passes


def rebuilt_on(rank):
    """Buckets wait to be put into order after the first plain pass: all ranks talk to do that."""
    parts = all_samples(SIZES[:2])
    net = net_of()
    wanted = wanted_of(net, parts)
    module = Replicated(net, bucket_cap_mb=1e-4)
    square(module, parts[rank]).backward()
    net.zero_grad()
    fails = Fails(0 if rank else None, ValueError)
    try:
        step(lambda b: (fails(b["x"]), square(module, b))[1], parts[rank])
    except Exception as error:
        told = type(error).__name__
    fails.most = None
    step(lambda b: square(module, b), parts[rank])
    first = worst_error(gradients(net), wanted)
    net.zero_grad()
    square(module, parts[0]).backward()
    alone = net_of()
    square(alone, parts[0]).backward()
    return told, first, worst_error(gradients(net), gradients(alone))


def test_a_replica_that_has_just_begun_is_ready_for_steps_and_for_plain_passes():
    for rank, (told, *errors) in enumerate(run_ranks(rebuilt_on)):
        assert told == ("ValueError" if rank else "RemoteRankError")
        assert max(errors) < RTOL


def large_on(rank):
    """Gradients that go as they are, those that go together, and two types."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 300), nn.Linear(300, 5)).double()
    net[2].float()
    assert net[1].weight.nbytes > 4 * 2**20

    def fn(run, b):
        return net[2](net[1](net[0](b["x"])).float()).square().mean()

    parts = all_samples(SIZES[:2])
    fn(net, joined(parts)).backward()
    wanted = gradients(net)
    net.zero_grad()
    # one gradient in another order of memory
    net[1].weight.register_hook(lambda g: g.t().contiguous().t() if rank else g)
    step(lambda b: fn(net, b), parts[rank], maximum=8, group=dist.group.WORLD)
    return {
        name: worst_error({name: gradients(net)[name]}, {name: wanted[name]}) for name in wanted
    }


def test_large_and_small_gradients_of_two_types_are_summed_up():
    for found in run_ranks(large_on):
        assert max(error for name, error in found.items() if name[0] != "2") < 1e-5
        assert max(error for name, error in found.items() if name[0] == "2") < 1e-5


# --- more than one buffer of small ones


class Scales(nn.Module):
    """Parameters that are small for themselves, and too many for one buffer."""

    def __init__(self, sizes):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(n) for n in sizes)

    def forward(self, x):
        return sum(x.mean() * scale.mean() for scale in self.scales)


def many_small_on(rank):
    # 28 MiB: a full buffer, and a last one that is shorter
    sizes = [900_000] * 7 + [600_000] * 2 + [3]
    net = Scales(sizes)
    module = Replicated(net)
    step(lambda x: module(x).square().mean(), torch.full((2, 4), float(rank + 1)))
    alone = Scales(sizes)
    wanted = sum(alone(torch.full((2, 4), n)).square().mean() for n in (1.0, 2.0)) / 2
    wanted.backward()
    return worst_error(gradients(net), gradients(alone))


def test_gradients_that_fill_several_buffers_are_those_of_all_samples():
    assert max(run_ranks(many_small_on)) < 1e-6
