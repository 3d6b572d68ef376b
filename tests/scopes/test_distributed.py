"""DTensors and distributed modules on a mesh of one rank: wrappers that are disposed inside."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tenure import DisposedTensorError, NewDisposeScope, dispose, is_disposed, scoped


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    for _ in range(2):  # once for each thread of the group: a busy one may block its end for ever
        dist.barrier()
    dist.destroy_process_group()


def test_a_distributed_tensor_is_disposed_inside_and_whole_once_moved_out(mesh):
    leaf = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
    with NewDisposeScope() as scope:
        middle = leaf * leaf
        assert middle in scope
        total = scope.move_to_outer(middle.sum())
        dispose(middle)
        made = leaf * 2
    for gone in (middle, made):
        assert is_disposed(gone)
        assert isinstance(gone, DTensor)  # its class has slots and stays
        with pytest.raises(DisposedTensorError, match=r"float32\[4, 2\] on cpu"):
            gone + 1
    total.backward()
    assert torch.equal(leaf.grad.full_tensor(), 2 * torch.arange(8.0).view(4, 2))
    result = scoped(lambda x: (x + x) * 1)(leaf)
    assert result.full_tensor().sum().item() == 56


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


@pytest.mark.parametrize("wrapped", [sharded, lambda model, _: DistributedDataParallel(model)])
def test_a_distributed_module_trains_bit_for_bit_alike(mesh, wrapped):
    def run(opener) -> list[list[float]]:
        torch.manual_seed(0)
        model = wrapped(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for around in (opener, opener, nullcontext):
            with around():
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [getattr(p, "full_tensor", lambda p=p: p)().tolist() for p in model.parameters()]

    assert run(NewDisposeScope) == run(nullcontext)
