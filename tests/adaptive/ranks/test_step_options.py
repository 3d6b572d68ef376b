"""The other arguments of a step, on several ranks, and how much these say to each other."""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import memory_budget, reset, step

from ..step.step_cases import gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, Fails, all_samples, joined, net_of, square, wanted_of


def budget_on(rank):
    """A real shortage on one rank: failures, trials, verification, and all of it taken back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Dropout(0.0), nn.Linear(256, 2)).double()
    x = torch.randn(600, 16, dtype=torch.float64)
    net(x).square().mean().backward()
    wanted = gradients(net)
    net.zero_grad()
    module = Replicated(net)
    mine = x[:500] if rank else x[500:]
    found = []
    for _ in range(3):
        net.zero_grad()
        with memory_budget("1MiB" if rank else "1GiB"):
            result = step(lambda b: module(b).square().mean(), mine)
        found.append((worst_error(gradients(net), wanted), len(result.sizes), result.attempts))
    return found


def test_a_rank_that_is_short_of_memory_splits_and_the_other_does_not():
    whole, split = run_ranks(budget_on)
    assert max(error for error, _, _ in whole + split) < RTOL
    assert [sizes for _, sizes, _ in whole] == [1] * 3
    assert min(sizes for _, sizes, _ in split) > 1
    # known from then on
    assert split[0][2] > 1
    assert split[-1][2] == 1


def options_on(rank):
    parts = all_samples(SIZES[:2])
    net = net_of()
    wanted = wanted_of(net, parts)
    module = Replicated(net)
    errors = {}

    def check(name, factor, **options):
        net.zero_grad()
        result = step(lambda b: square(module, b), parts[rank], maximum=4, **options)
        scaled = {key: value * factor for key, value in wanted.items()}
        errors[name] = worst_error(gradients(net), scaled)
        return result

    check("scaler", 8.0, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    check("the group by name", 1.0, group=dist.group.WORLD)
    check("backward", 0.25, backward=lambda loss: (loss / 4).backward())
    seen = []
    handle = net[0].weight.register_hook(seen.append)
    check("hooks", 1.0)
    handle.remove()
    assert len(seen) == 1
    net.zero_grad()
    result = step(lambda b: (square(module, b), len(b["x"])), parts[rank], maximum=4, has_aux=True)
    assert result.aux == result.sizes
    assert sum(result.sizes) == SIZES[rank]
    return errors


def test_scalers_backward_functions_hooks_and_what_is_beside_the_loss():
    for found in run_ranks(options_on):
        assert max(found.values()) < RTOL


def own_on(rank):
    """Tensors that are exchanged by nobody, and those that a named group exchanges."""
    parts = all_samples(SIZES[:2])
    n, net = 2, net_of()
    temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def fn(run, b):
        return (run(b["x"]) * temperature).square().mean()

    whole = joined(parts)
    whole["x"].requires_grad_()
    fn(net, whole).backward()
    wanted = gradients(net)
    wanted_inputs = whole["x"].grad.split(SIZES[:2])[rank]
    wanted_temperature = temperature.grad.clone()
    errors = {}
    for name in ("replica", "group"):
        module = Replicated(net) if name == "replica" else net
        group = None if name == "replica" else dist.group.WORLD
        net.zero_grad()
        temperature.grad = None
        batch = {**parts[rank], "x": parts[rank]["x"].clone().requires_grad_()}
        step(lambda b, module=module: fn(module, b), batch, maximum=4, group=group)
        errors[name] = worst_error(gradients(net), wanted)
        inputs = worst_error({"x": batch["x"].grad}, {"x": n * wanted_inputs})
        errors[f"{name}, inputs"] = inputs
        got = temperature.grad.clone()
        if name == "replica":
            dist.all_reduce(got)
            got /= n
        errors[f"{name}, a tensor"] = worst_error({"t": got}, {"t": wanted_temperature})
    return errors


def test_what_is_not_exchanged_has_its_ranks_part_on_the_scale_of_a_replica():
    for found in run_ranks(own_on):
        assert {name: error for name, error in found.items() if not error < RTOL} == {}


class Counting(dist.ProcessGroupGloo):
    """The connections for votes: of two ranks each sends its vote once."""

    sent: ClassVar = []

    def send(self, tensors, *to):
        self.sent.extend(tensors)
        return super().send(tensors, *to)


def counted_on(rank):
    """How many collectives a call has, whatever its attempts."""
    dist.ProcessGroupGloo = Counting
    sent, all_reduce, broadcast = Counting.sent, dist.all_reduce, dist.broadcast

    def counting(collective):
        return lambda tensor, **how: (sent.append(tensor), collective(tensor, **how))

    dist.all_reduce, dist.broadcast = counting(all_reduce), counting(broadcast)
    parts = all_samples(SIZES[:2])
    counts = {}
    for name in ("plain", "buffers"):
        module = Replicated(net_of(name))
        for most in (None, 3):
            reset()
            fails = Fails(most)
            sent.clear()
            result = step(
                lambda b, module=module, fails=fails: (fails(b["x"]), square(module, b))[1],
                parts[rank],
                batchnorm="per_chunk",
            )
            counted = len(sent), sum(tensor.nbytes for tensor in sent)
            counts[f"{name}, {'one' if most is None else 'several'} attempts"] = counted
            assert (result.attempts > 1) is (most is not None)
    n_bytes = sum(p.nbytes for p in module.parameters())
    return counts, n_bytes


def test_a_call_has_one_vote_and_one_exchange_however_often_it_was_begun():
    for counts, n_bytes in run_ranks(counted_on):
        (plain, plain_bytes), (again, again_bytes), (buffers, _), (_, _) = counts.values()
        # the vote, which has the loss in it, and the gradients
        assert (plain, again) == (2, 2)
        assert plain_bytes == again_bytes
        assert plain_bytes - n_bytes < 500
        # running mean and variance, and the count of batches
        assert buffers == 4
