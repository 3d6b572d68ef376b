"""Predictions of sharded modules: what each rank takes, told by each alone, and nothing changed."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tenure.adaptive import PredictionError, memory_budget, predict_peak
from tests.programs import run_program
from tests.true_peak import counted_bytes

from ..ranks.launch import IMPORTED, run_ranks
from ..ranks.sharded_nets import KINDS, loss_of, net_of, tokens, whole_gradients


def measured_bytes(fn, *args):
    with memory_budget("1GiB") as budget:
        fn(*args).backward()
    return budget.peak_bytes


def predicted_and_measured(kind):
    net, found = net_of(kind), []
    fn = loss_of(net)
    # before and after the first pass, which makes what is kept; with gradients of before
    for n_samples in (3, 8, 8):
        x = tokens(n_samples)
        found.append([counted_bytes(fn, x), measured_bytes(fn, x)])
    with torch.no_grad():
        # the root stays whole
        fn(tokens(2))
    found.append([counted_bytes(fn, x), measured_bytes(fn, x)])
    return found


# a group that sends nothing, and holds nothing for a moment longer
ALONE = """
import json, sys
import torch.distributed as dist
sys.path.insert(0, {root!r})
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.adaptive.predict.test_sharded import KINDS, predicted_and_measured
dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size={n})
print(json.dumps({{kind: predicted_and_measured(kind) for kind in KINDS}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "n"), [(3, 4), (0, 8)])
def test_the_peak_is_what_a_budget_counts(rank, n):
    program = ALONE.format(root=str(Path(__file__).parents[3]), rank=rank, n=n)
    done = run_program(program, imported=IMPORTED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(KINDS)
    for kind, pairs in found.items():
        assert [predicted for predicted, _ in pairs] == [measured for _, measured in pairs], kind


def predicted_and_measured_by_gloo(rank):
    found = {}
    for kind in KINDS:
        fn, x = loss_of(net_of(kind)), tokens(8)
        # a thread of gloo may hold what it has sent for a moment longer
        found[kind] = [counted_bytes(fn, x), [measured_bytes(fn, x) for _ in range(3)]]
    return found


@pytest.mark.slow
def test_real_ranks_take_what_is_predicted():
    for found in run_ranks(predicted_and_measured_by_gloo, 2, timeout=180):
        for kind, (predicted, measured) in found.items():
            # what is sent may be gone before the worst moment, or after it
            assert 0.95 * min(measured) <= predicted <= 1.05 * max(measured), kind


# the device of the first counts, beside the host; the second has no other than the host
OFFLOADED = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
sys.path.insert(0, {root!r})
from tenure.adaptive import predict_peak
from tests.true_peak import true_peak_bytes

def made(kind):
    mesh = init_device_mesh(kind, (4,))
    net = nn.Sequential(*[nn.Sequential(nn.Linear(250, 301), nn.Tanh(), nn.Linear(301, 250))
                          for _ in range(4)])
    for module in (*net, net):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    return lambda x: net(x).square().mean(), torch.randn(8, 250).to(kind), net, optimizer

def shards(tensors):
    return sum(each.to_local().untyped_storage().nbytes() for each in tensors)

def measured():
    from tenure.testing import simulated_accelerator
    with simulated_accelerator() as sim:
        dist.init_process_group("cpu:fake,sim:fake", store=FakeStore(), rank={rank}, world_size=4)
        fn, x, net, optimizer = made("sim")
        sim.reset_peak()
        fn(x).backward()
        host = shards(net.parameters()) + shards(p.grad for p in net.parameters())
        return [sim.peak_bytes, host + true_peak_bytes(optimizer.step)]

def predicted():
    dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=4)
    fn, x, _, optimizer = made("cpu")
    report = predict_peak(fn, x, optimizer=optimizer, device="cuda")
    assert report.later_peak_bytes is None
    return [report.peak_bytes, report.host_bytes]

print(json.dumps({what}()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_offloaded_is_told_apart_from_the_device(rank):
    found = []
    for what in ("measured", "predicted"):
        program = OFFLOADED.format(root=str(Path(__file__).parents[3]), rank=rank, what=what)
        done = run_program(program, imported=IMPORTED)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (device, host), (device_told, host_told) = found
    assert device_told == device
    assert host <= host_told <= 1.01 * host


def train_as_without(rank, kinds):
    """The kinds that predictions between steps, which only one rank makes, change anything of."""
    return [kind for kind in kinds if not _trains_as_without(rank, kind)]


def _trains_as_without(rank, kind):
    found = []
    for predicts in (False, True):
        net = net_of(kind, torch.float64)
        optimizer = torch.optim.Adam(net.parameters())
        fn = loss_of(net)
        for i in range(3):
            x = tokens(3, seed=10 * i + rank)
            if predicts and rank == 1:
                predict_peak(fn, x)
                predict_peak(fn, x, optimizer=optimizer)
                # in the middle of nothing, and once more
                predict_peak(lambda x, fn=fn: fn(x).backward(), x)
            fn(x).backward()
            if i:
                optimizer.step()
                optimizer.zero_grad()
        fn(x).backward()
        gradients = whole_gradients(net)
        values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        found.append([*gradients.values(), *values])
        assert len(gradients) == len(values)
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_a_rank_predicts_alone_and_trains_on_as_without():
    # in one launch: a process meets each operation of sharded tensors for the first time but once
    assert run_ranks(train_as_without, 2, kinds=[*KINDS], timeout=180) == [[], []]


def refusal_in_the_middle(rank):
    net = net_of("plain")
    fn, x = loss_of(net), tokens(3)
    net.set_requires_gradient_sync(False)
    fn(x).backward()
    try:
        predict_peak(fn, x)
    except PredictionError as error:
        text = str(error)
    net.set_requires_gradient_sync(True)
    fn(x).backward()
    return text, predict_peak(fn, x).peak_bytes > 0


@pytest.mark.slow
def test_gradients_that_wait_for_an_exchange_are_refused():
    for text, goes_on in run_ranks(refusal_in_the_middle, 2):
        assert "a module of fully_shard has gradients or parameters that wait for an" in text
        assert goes_on


def own_exchange(rank):
    """What a loss that all ranks share takes: an operation of the user's own is not sent either."""
    count = torch.ones((), dtype=torch.int64)

    def shared_loss():
        loss = loss_of(net_of("plain"))

        def fn(x):
            total = count.clone()
            dist.all_reduce(total)
            return loss(x) / total

        return fn

    # one rank alone
    predicted = counted_bytes(shared_loss(), tokens(4)) if rank == 0 else None
    # a thread of gloo may hold what it has sent for a moment longer
    measured = [measured_bytes(shared_loss(), tokens(4)) for _ in range(5)]
    return predicted, measured, int(count)


@pytest.mark.slow
def test_an_exchange_of_the_users_own_reaches_nobody():
    (predicted, measured, count), _ = run_ranks(own_exchange, 2)
    assert predicted in measured
    assert count == 1
