"""Many ranks in one process: what one of them takes, of models that were made without data."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenure.adaptive import AdaptiveUsageError, fake_ranks, memory_budget, plan, predict_peak

WIDTH = 96


@contextmanager
def one_of_many(rank, n_ranks):
    """A group that sends nothing, for models with data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    yield
    dist.destroy_process_group()


def net_of(mesh, **options):
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
    ("make", "shape", "names"), [(net_of, (4,), None), (parallel_net_of, (2, 2), ("dp", "tp"))]
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
        with (
            pytest.raises(AdaptiveUsageError, match="Give at least one rank"),
            fake_ranks(*arguments, rank=rank),
        ):
            pass
    with (
        pytest.raises(AdaptiveUsageError, match="has a process group"),
        fake_ranks(2),
        fake_ranks(2),
    ):
        pass
    with fake_ranks(2), pytest.raises(AdaptiveUsageError, match="the bytes of all gradients once"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with one_of_many(0, 2):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


def test_a_share_of_the_budget_is_beside_the_shards_alone():
    with one_of_many(0, 4):
        net, batch = net_of(None), torch.randn(8, WIDTH)
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
