"""Predictions of sharded modules: what each rank takes, told by each alone, and nothing changed."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenure.adaptive import (
    AdaptiveUsageError,
    PredictionError,
    fake_ranks,
    memory_budget,
    plan,
    predict_peak,
)
from tests.programs import IMPORTED, run_program
from tests.true_peak import counted_bytes

from ..ranks.launch import run_checks
from ..ranks.sharded_nets import KINDS, loss_of, net_of, tokens, whole_gradients

_ROOT = str(Path(__file__).parents[3])


def told_by(program, **names):
    done = run_program(program.format(root=_ROOT, **names), imported=IMPORTED)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def measured_bytes(fn, *args):
    with memory_budget("1GiB") as budget:
        fn(*args).backward()
    return budget.peak_bytes


def predicted_and_measured(kind):
    # what is sent for one block beside the work of another, in the kinds that send in two ways
    net, found = net_of(kind, depth=3 if kind in ("plain", "kept whole") else 1), []
    fn = loss_of(net)
    # before and after the first pass, which makes what is kept, and gradients
    for n_samples in (3, 8):
        x = tokens(n_samples)
        found.append([counted_bytes(fn, x), measured_bytes(fn, x)])
    with torch.no_grad():
        # the root stays whole
        fn(tokens(2))
    found.append([counted_bytes(fn, x), measured_bytes(fn, x)])
    return found


# in a group that sends nothing, and holds nothing for a moment longer
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_what_a_budget_counts(kind):
    with one_of_many(3, 4):
        pairs = predicted_and_measured(kind)
    assert [predicted for predicted, _ in pairs] == [measured for _, measured in pairs]


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
        dist.init_process_group("cpu:fake,sim:fake", store=FakeStore(), rank=3, world_size=4)
        fn, x, net, optimizer = made("sim")
        sim.reset_peak()
        fn(x).backward()
        host = shards(net.parameters()) + shards(p.grad for p in net.parameters())
        return [sim.peak_bytes, host + true_peak_bytes(optimizer.step)]

def predicted():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    fn, x, _, optimizer = made("cpu")
    report = predict_peak(fn, x, optimizer=optimizer, device="cuda")
    assert report.later_peak_bytes is None
    return [report.peak_bytes, report.host_bytes]

print(json.dumps({what}()))
"""


@pytest.mark.slow
def test_what_is_offloaded_is_told_apart_from_the_device():
    device, host = told_by(OFFLOADED, what="measured")
    device_told, host_told = told_by(OFFLOADED, what="predicted")
    assert device_told == device
    assert host <= host_told <= 1.01 * host


# in one launch: a process meets each operation of sharded tensors for the first time but once
@pytest.mark.slow
def test_a_rank_predicts_alone_and_trains_on_as_without():
    checks = real_ranks_take_what_is_predicted, trains_on_as_without, waiting_gradients_are_refused
    run_checks(*checks, an_exchange_of_the_users_own_reaches_nobody, timeout=180)


def real_ranks_take_what_is_predicted(rank):
    for kind in ("padded", "tensor parallel"):
        fn, x = loss_of(net_of(kind, depth=2 if kind == "padded" else 1)), tokens(8)
        # a thread of gloo may hold what it has sent for a moment longer
        predicted, measured = counted_bytes(fn, x), [measured_bytes(fn, x) for _ in range(3)]
        # what is sent may be gone before the worst moment, or after it
        assert 0.95 * min(measured) <= predicted <= 1.05 * max(measured), kind


def trains_on_as_without(rank):
    """Of predictions between steps, which only one rank makes, nothing is different."""
    for kind in ("padded", "kept whole", "half precision", "tensor parallel"):
        without = _trained(kind, rank, predicts=False)
        assert without == _trained(kind, rank, predicts=rank == 1), kind


def _trained(kind, rank, *, predicts):
    net = net_of(kind, torch.float64, depth=1)
    optimizer = torch.optim.Adam(net.parameters())
    fn = loss_of(net)
    for i in range(3):
        x = tokens(3, seed=10 * i + rank)
        # before the first pass, with gradients, and with the state of a step
        if predicts:
            predict_peak(fn, x, optimizer=optimizer)
            if i == 1:
                predict_peak(lambda x: fn(x).backward(), x)
        fn(x).backward()
        if i == 1:
            optimizer.step()
            optimizer.zero_grad()
    gradients = whole_gradients(net)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    assert len(gradients) == len(values)
    return [each.tolist() for each in (*gradients.values(), *values)]


def waiting_gradients_are_refused(rank):
    net = net_of("plain", depth=1)
    fn, x = loss_of(net), tokens(3)
    net.set_requires_gradient_sync(False)
    fn(x).backward()
    refusal = "a module of fully_shard has gradients or parameters that wait for an"
    with pytest.raises(PredictionError, match=refusal):
        predict_peak(fn, x)
    net.set_requires_gradient_sync(True)
    fn(x).backward()
    assert predict_peak(fn, x).peak_bytes > 0


def an_exchange_of_the_users_own_reaches_nobody(rank):
    """What a loss that all ranks share takes: an operation of the user's own is not sent either."""
    count = torch.ones((), dtype=torch.int64)

    def shared_loss():
        loss = loss_of(net_of("plain", depth=1))

        def fn(x):
            total = count.clone()
            dist.all_reduce(total)
            return loss(x) / total

        return fn

    # one rank alone
    predicted = counted_bytes(shared_loss(), tokens(4)) if rank == 0 else None
    # a thread of gloo may hold what it has sent for a moment longer
    measured = [measured_bytes(shared_loss(), tokens(4)) for _ in range(5)]
    assert rank or predicted in measured
    assert count == 1


# --- many ranks in one process: what one of them takes, of models that were made without data

WIDTH = 96


@contextmanager
def one_of_many(rank, n_ranks):
    """A group that sends nothing, for models with data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    yield
    dist.destroy_process_group()


def layers_of(mesh, **options):
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 203), nn.Tanh(), nn.Linear(203, WIDTH)) for _ in range(3)
    ]
    net = nn.Sequential(*blocks)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def parallel_net_of(mesh):
    # not a view at the end, of which fully_shard warns
    net = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH), nn.Tanh())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp"])
    return net


def report_of(net, device="cuda"):
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    batch = torch.empty(8, WIDTH)
    return predict_peak(lambda x: net(x).exp().mean(), batch, optimizer=optimizer, device=device)


@pytest.mark.parametrize(
    ("make", "shape", "names"), [(layers_of, (4,), None), (parallel_net_of, (2, 2), ("dp", "tp"))]
)
def test_a_model_without_data_takes_what_one_with_data_does(make, shape, names):
    with fake_ranks(*shape, names=names, rank=3) as mesh:
        without = report_of(make(mesh))
    with one_of_many(3, 4):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = report_of(make(mesh))
    assert not dist.is_initialized()
    assert without.device == data.device == "cuda"
    for name in ("peak_bytes", "later_peak_bytes", "reserved_bytes", "categories"):
        assert getattr(without, name) == getattr(data, name)


def test_a_large_model_takes_no_memory():
    with fake_ranks(1024) as mesh:
        net = nn.Sequential(*(nn.Linear(65_536, 65_536) for _ in range(8)))
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
        report = predict_peak(lambda x: net(x).sum(), torch.empty(1, 65_536), device="cuda")
    assert 32 * 2**30 < report.peak_bytes < 80 * 2**30


def test_mistakes_are_refused_by_name():
    for arguments, rank in (((), 0), ((0,), 0), ((4,), 4), ((4,), -1)):
        with pytest.raises(AdaptiveUsageError, match="Give at least one rank"):
            fake_ranks(*arguments, rank=rank).__enter__()
    with pytest.raises(AdaptiveUsageError, match="has a process group"), fake_ranks(2):
        fake_ranks(2).__enter__()
    with fake_ranks(2), pytest.raises(AdaptiveUsageError, match="the bytes of all gradients once"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with one_of_many(0, 2):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


def test_a_share_of_the_budget_is_beside_the_shards_alone():
    with one_of_many(0, 4):
        net, batch = layers_of(None), torch.randn(8, WIDTH)
        with memory_budget("4MiB"):
            found = plan(lambda x: net(x).square().mean(), batch, "50%", margin=0)
    assert found.budget_bytes == found.baseline_bytes + 2 * 2**20


def test_what_an_exchange_takes_is_there_until_two_more_have_run():
    def fn(x):
        outs = [torch.empty_like(x) for _ in range(4)]
        for _ in range(4):
            dist.all_gather(outs, x)

    x = torch.zeros(1 << 18)
    with one_of_many(0, 4):
        assert predict_peak(fn, x).peak_bytes == (1 + 4 + 3 * 4) * x.nbytes
