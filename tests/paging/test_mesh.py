"""A model handed to FSDP2: it trains on two ranks as on one, and says what it does not do."""

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tenure.adaptive import step
from tenure.paging import PagingError, ShardedModel, page
from tests.adaptive.ranks.launch import run_ranks
from tests.adaptive.ranks.sharded_nets import whole_gradients
from tests.adaptive.ranks.test_step_sharded import all_samples, batch_of, differs, mean, plain_net

RTOL = 1e-10


def of_all(net):
    return mean(net)(all_samples())


def averaged(net):
    return sum(mean(net)(batch_of(rank)) for rank in (0, 1)) / 2


def trained(rank):
    """Differences from one process that has the samples of all; steps and votes among them."""
    net, other = plain_net(), plain_net()
    loss = float(of_all(other).detach())
    handle = page(net, mesh=init_device_mesh("cpu", (2,)), training=True)
    assert type(handle) is ShardedModel
    assert handle.model is net
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for maximum in (None, 4):
        optimizer.zero_grad()
        options = {} if maximum is None else {"maximum": maximum}
        result = step(mean(handle), batch_of(rank), model=net, **options)
        found.append([abs(float(result.loss) - loss), differs(net, of_all)[0]])
    assert all(p.device.type == "cpu" for p in net.parameters())
    # torch's own loop averages the ranks, whatever they have
    optimizer.zero_grad()
    mean(handle)(batch_of(rank)).backward()
    averaged(other).backward()
    found.append([0.0, differs(net, averaged)[0]])
    optimizer.step()
    torch.optim.SGD(other.parameters(), 0.1).step()
    moved = {name: p.full_tensor() for name, p in net.named_parameters()}
    worst = max(float((moved[n] - p).detach().abs().max()) for n, p in other.named_parameters())
    return [found, worst, list(handle.sharded), len(whole_gradients(net))]


def test_two_ranks_train_as_one_process_that_has_all_samples():
    blocks = [f"blocks.{i}" for i in range(len(plain_net().blocks))]
    for found, worst, sharded, n_gradients in run_ranks(trained):
        assert all(loss < 1e-12 and differing < RTOL for loss, differing in found)
        assert worst < RTOL
        assert sharded == [*blocks, ""]
        assert n_gradients == len(list(plain_net().parameters()))


def said_by(work):
    try:
        return str(work())
    except PagingError as error:
        return str(error)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.layers[1].weight = self.layers[0].weight


def refused(rank):
    """What is said of each argument, verb and model."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {
        "max_layer_size": 2, "budget": "1MiB", "host": Path("folder"), "keep": ("0",),
        "prefetch": 1, "methods": ("encode",), "activations": "host", "device": "meta",
    }  # fmt: skip
    found = {
        name: said_by(partial(page, net, mesh=mesh, **{name: each}))
        for name, each in options.items()
    }
    found["mesh"] = said_by(lambda: page(net, mesh="cuda"))
    found["shared"] = said_by(lambda: page(Shared(), mesh=mesh))
    found["untouched"] = str(all(type(p) is nn.Parameter for p in net.parameters()))
    handle = page(net, "cpu", mesh=mesh, host="pageable")
    found["repr"] = repr(handle)
    for verb in ("unpage", "report", "__enter__"):
        found[verb] = said_by(getattr(handle, verb))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found["optimizer_step"] = said_by(lambda: handle.optimizer_step(optimizer))
    found["twice"] = said_by(lambda: page(net, mesh=mesh))
    return found


def test_what_fsdp2_does_not_have_is_refused_by_name():
    found = run_ranks(refused)[0]
    for name in ("max_layer_size", "budget", "keep", "prefetch", "methods", "activations", "host"):
        assert found[name].startswith(f"{name}= says nothing to FSDP2, which a model is handed to")
    for name, text in {
        "device": "device='meta' is not that of the mesh, 'cpu'. Leave it out.",
        "mesh": "mesh='cuda' is no DeviceMesh. Make one on each rank: init_dev",
        "shared": "'layers.0.weight' and 'layers.1.weight' are one parameter, of two layers that",
        "untouched": "True",
        "repr": "<ShardedModel FSDPSequential over DeviceMesh(",
        "unpage": "unpage() was called of <ShardedModel FSDPSequential over",
        "report": "report() was called of <ShardedModel FSDPSequential over",
        "optimizer_step": "optimizer_step() was called of <ShardedModel FSDPSequential over",
    }.items():
        assert found[name].startswith(text)
    assert "fully_shard can't be undone" in found["unpage"]
    assert found["__enter__"] == found["unpage"]
    assert "Call the step() of the optimizer after it." in found["optimizer_step"]
    assert "is a DTensor, of which other ranks have parts, as fully_shard" in found["twice"]
