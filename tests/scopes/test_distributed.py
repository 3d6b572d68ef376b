"""DTensors and sharded modules on a mesh of one rank: wrappers that are disposed inside."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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


def test_a_fully_sharded_module_trains_bit_for_bit_alike(mesh):
    def run(in_scopes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step() -> None:
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            if in_scopes:
                with NewDisposeScope():
                    step()
            else:
                step()
        step()
        return [parameter.full_tensor() for parameter in model.parameters()]

    for expected, actual in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, actual)
