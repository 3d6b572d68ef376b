"""A model that is paged over the ranks of a mesh: FSDP2 shards it, with the shards on the host.

Several devices are torch's own affair: each rank has a part of each layer in host memory, and the
parts meet on the devices while the layer runs. This chooses the layers and the policy, no more.

Invariant: what FSDP2 does not have, an argument or a verb, is refused by name, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tenure._errors import PagingError

from ._checks import checked_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MOST_DIMENSIONS = 2
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_FORWARD = nn.Module.forward


def _refused(verb: str, why: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a verb of paging which FSDP2 does not have."""

    def refuse(self: ShardedModel, *_: object, **__: object) -> NoReturn:
        raise PagingError(f"{verb} was called of {self!r}: {why}")

    refuse.__doc__ = f"Refuse: {why}"
    return refuse


class ShardedModel:
    """A model that FSDP2 has sharded over a mesh, with the shards in host memory.

    Attributes:
        model: the model, the same object as before; its parameters are DTensors now.
        mesh: the mesh.
        sharded: the names of the modules whose weights are gathered at a time; the rest of the
            model, which is gathered first, is ``""``.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sharded: tuple[str, ...]) -> None:
        self.model, self.mesh, self.sharded = model, mesh, sharded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    unpage = __enter__ = __exit__ = _refused(
        "unpage()",
        "fully_shard can't be undone: torch changes the class of modules and their parameters. "
        "Take the whole weights, on all ranks at once, by get_model_state_dict() of "
        "torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True), "
        "and load them into a new model.",
    )
    report = _refused(
        "report()",
        "FSDP2 moves the weights, and no copy of its is measured here. Ask torch.profiler for "
        "time, and MemReporter().report(group=...) of tenure.profiler for the memory of all ranks.",
    )
    optimizer_step = _refused(
        "optimizer_step()",
        "the gradients of FSDP2 are there when the backward pass is over. Call the step() of the "
        "optimizer after it.",
    )

    def __repr__(self) -> str:
        return f"<ShardedModel {type(self.model).__name__} over {self.mesh}>"


def shard(
    model: nn.Module,
    mesh: object,
    device: str | torch.device,
    host: object,
    given: list[str],
) -> ShardedModel:
    """Shard a model over a mesh.

    Args:
        model: a model in host memory, with the same weights on each rank.
        mesh: the mesh.
        device: as of ``page``.
        host: ``"pinned"`` or ``"pageable"``.
        given: the arguments of ``page`` that somebody gave and FSDP2 knows nothing of.

    Raises:
        PagingError: an argument is none for a mesh, or the model can't be sharded; it is as before.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    checked = _checked_mesh(mesh)
    _check_arguments(checked, device, host, given)
    checked_model(model)
    blocks = dict(_blocks(model, ""))
    _check_shared(blocks)
    # Of a mesh of CPUs nothing is copied, and there may be nothing that pins.
    pins = host == "pinned" and checked.device_type != "cpu"
    policy = CPUOffloadPolicy(pin_memory=pins)
    for module in (*blocks.values(), model):
        fully_shard(module, mesh=checked, offload_policy=policy)
    return ShardedModel(model, checked, (*blocks, ""))


def _checked_mesh(mesh: object) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise PagingError(
            f"mesh={mesh!r} is no DeviceMesh. Make one on each rank: "
            "init_device_mesh('cuda', (world_size,)) of torch.distributed.device_mesh."
        )
    if mesh.ndim > _MOST_DIMENSIONS:
        raise PagingError(
            f"mesh= has {mesh.ndim} dimensions: FSDP2 shards over one, or over the second of two, "
            "and replicates over the first. Pass a part of it, such as mesh['fsdp']."
        )
    return mesh


def _check_arguments(
    mesh: DeviceMesh, device: str | torch.device, host: object, given: list[str]
) -> None:
    # As it stands where nobody names one.
    if device != "cuda" and torch.device(device).type != mesh.device_type:
        raise PagingError(
            f"device={str(device)!r} is not that of the mesh, {mesh.device_type!r}. Leave it out."
        )
    if host not in ("pinned", "pageable"):
        given = [*given, "host"]
    if given:
        raise PagingError(
            f"{given[0]}= says nothing to FSDP2, which a model is handed to with mesh=: it gathers "
            "one layer at a time, keeps the shards of all in host memory, and plans nothing. Leave "
            "it out, or page on one device, without mesh=."
        )


def _blocks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers: what stands in a list or in a sequence, the outermost of them."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        # A list is never called, and so can't be one; nor does a layer without weights need to be.
        is_called = type(child).forward is not _FORWARD
        if isinstance(module, _CONTAINERS) and is_called and any(True for _ in child.parameters()):
            yield path, child
        else:
            yield from _blocks(child, path)


def _check_shared(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse weights that layers share, which only one of them would gather."""
    owners: dict[int, tuple[str, str]] = {}
    for path, block in blocks.items():
        for name, parameter in block.named_parameters():
            known = owners.setdefault(id(parameter), (path, f"{path}.{name}"))
            if known[0] != path:
                raise PagingError(
                    f"{known[1]!r} and '{path}.{name}' are one parameter, of two layers that are "
                    "sharded each by itself, and FSDP2 gathers a parameter for one. Call "
                    "fully_shard() of torch on what has both."
                )
