"""What torch keeps to itself of modules that are sharded, and of tensors that several ranks share.

A module of ``fully_shard`` keeps the whole parameters beside the shards: tensors whose storages it
fills before a forward or a backward pass, and empties after it. They are made by the first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from . import bound, optional, refuse
from .patches import Patch
from .quiet import aside_with_subclasses

_PURPOSE = "steps and predictions of sharded modules"
_GROUPS = "distributed.fsdp.FSDPModule._get_fsdp_state()._fsdp_param_groups"
_PROPAGATOR = "torch.distributed.tensor._sharding_prop.ShardingPropagator"
_PROPAGATES = "_propagate_tensor_meta_non_cached"
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
_FAKE_WORK = "torch._C._distributed_c10d.FakeWork"


def dtensor_class() -> Any:
    """Return the class DTensor, of which each rank has a part; None where nobody has made one."""
    # importing it takes seconds
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(tensor: object) -> bool:
    """Return whether it is a tensor of which each rank has a part, a DTensor."""
    cls = dtensor_class()
    return cls is not None and isinstance(tensor, cls)


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, by a collective; any other tensor as it is."""
    whole: Any = tensor
    return whole.full_tensor() if is_dtensor(tensor) else tensor


@contextmanager
def shapes_found_unseen() -> Iterator[None]:
    """Return a block in which no mode sees how torch finds the shape of a result that ranks share.

    It runs the operation on tensors without data as large as the whole.
    """
    # where nobody has imported it nothing is shared
    if dtensor_class() is not None and not hasattr(optional(_PROPAGATOR), _PROPAGATES):
        refuse(f"{_PROPAGATOR}.{_PROPAGATES}", _PURPOSE)
    with _finding_shapes.block():
        yield


def _unseen(find: Any) -> Any:
    def unseen(*args: Any) -> Any:
        with aside_with_subclasses():
            return find(*args)

    return unseen


_finding_shapes = Patch(_PROPAGATOR, {_PROPAGATES: _unseen})


def done_work() -> Any:
    """Return the handle of a collective that is done already, as C++ code takes it."""
    return bound(_FAKE_WORK, _PURPOSE)().boxed()


class Shards:
    """What torch keeps of some modules of ``fully_shard``.

    Args:
        modules: of any kind.

    Attributes:
        objects: those in whose attributes it is.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        states = [state for module in modules if (state := _state_of(module)) is not None]
        self._states = list({id(state): state for state in states}.values())
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._parameters = [each for group in self._groups for each in group.fsdp_params]
        # shards are not among the parameters of a module while these are whole, as after a forward
        # pass of a root without a backward pass
        parts: list[Any] = [each for module in modules for each in module._parameters.values()]
        parts += self.shards()
        self._meshes = [group.mesh_info.mesh for group in self._groups]
        self._meshes += [part.device_mesh for part in parts if is_dtensor(part)]
        contexts = [each for s in self._states for each in (s._state_ctx, s._comm_ctx)]
        found = [*self._states, *self._groups, *self._parameters, *contexts]
        self.objects = list({id(each): each for each in found}.values())

    @property
    def n_ranks(self) -> int:
        """How many ranks share parameters, at the most; 1 where none is shared."""
        return max((mesh.size() for mesh in self._meshes), default=1)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that this one shares parameters with, and itself, as all ranks count them."""
        return frozenset(rank for mesh in self._meshes for rank in mesh.mesh.flatten().tolist())

    @property
    def process_groups(self) -> list[Any]:
        """The process groups in which these modules talk."""
        return [group for mesh in self._meshes for group in mesh.get_all_groups()]

    @property
    def n_averaged(self) -> int:
        """Over how many ranks ``fully_shard`` averages gradients, replicas of the shards too."""
        return max(map(_n_averaged, self._groups), default=1)

    @property
    def divisors(self) -> list[float]:
        """What it divides the sum of these gradients by, each number once; 1 where it has none."""
        given = ((g.gradient_divide_factor, _n_averaged(g)) for g in self._groups)
        return sorted({float(n if each is None else each) for each, n in given} or {1.0})

    @property
    def exchanges(self) -> bool:
        """Whether all backward passes exchange gradients."""
        return all(group.reduce_grads and group.all_reduce_grads for group in self._groups)

    def shards(self) -> list[Tensor]:
        """Return the parameters of ``fully_shard``, of which this rank has a part."""
        return [each.sharded_param for each in self._parameters]

    def offloaded(self) -> list[Tensor]:
        """Return the shards of ``CPUOffloadPolicy``, which are in the memory of the host."""
        return [each.sharded_param for each in self._parameters if each.offload_to_cpu]

    def reshard(self) -> None:
        """Let go of parameters that are whole; no rank talks to another."""
        for each in self._whole():
            info = each._module_info
            # the user froze or thawed the parameter that the module shows, and passes ask the shard
            shown = info.module._parameters[info.param_name]
            each.sharded_param.requires_grad_(shown.requires_grad)
        for group in self._groups:
            group.reshard()

    def reset(self) -> None:
        """Let modules run forward whose last pass was broken off; no rank talks to another."""
        for state in self._states:
            reset = getattr(state, "_reset_iter_state", None)
            if state._is_root and reset is not None:
                reset()

    @property
    def is_exchanging(self) -> bool:
        """Whether something of an earlier pass waits for an exchange."""
        return any(map(_has_gradient, self._parameters)) or any(
            group._all_gather_result is not None or group._partial_reduce_output is not None
            for group in self._groups
        )

    def hidden(self) -> list[Tensor]:
        """Return the tensors that no module shows now."""
        found = [each._sharded_param_data for each in self._parameters]
        found += [group._all_gather_output for group in self._groups]
        for each in self._whole():
            found += [each.sharded_param, *each.all_gather_outputs]
            found += [each._unsharded_param, *each._unsharded_inner_tensors]
        return found

    def begin_anew(self) -> None:
        """Have them make the whole parameters again, as in their first pass.

        The attributes of `objects` are to be put back after that.
        """
        whole = set(map(id, self._whole()))
        for each in self._parameters:
            if id(each) not in whole:
                each.all_gather_outputs = []
                each.__dict__.pop("_unsharded_param", None)
        for group in self._groups:
            # or it would compare addresses, and pad again what is padded
            group._reset_sharded_params = True

    def _whole(self) -> list[Any]:
        """Return the parameters that are whole now, as after a forward without a backward."""
        groups = [group for group in self._groups if not group.is_sharded]
        return [each for group in groups for each in group.fsdp_params]


class ShardedGroup:
    """Parameters of a module of ``fully_shard`` that are exchanged together."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def has_unexchanged(self) -> bool:
        """Whether gradients of a backward pass without exchange wait for one with it."""
        return any(map(_has_gradient, self._group.fsdp_params))

    def drop_unexchanged(self) -> None:
        """Forget such gradients."""
        for each in self._group.fsdp_params:
            # from torch 2.15 on they wait in .grad alone, which this name then only shows
            if "unsharded_accumulated_grad" in vars(each):
                each.unsharded_accumulated_grad = None
            if getattr(each, "_unsharded_param", None) is not None:
                each._unsharded_param.grad = None


def sharded_groups(module: nn.Module) -> list[ShardedGroup]:
    """Return those of one module; none if it is not sharded by ``fully_shard``."""
    state = _state_of(module)
    return [] if state is None else [ShardedGroup(group) for group in _groups_of(state)]


def offloading(told: Any) -> AbstractContextManager[None]:
    """Return a block in which ``fully_shard`` copies offloaded shards even on the CPU.

    Args:
        told: its ``is_offloading`` is True while a gradient is copied to the host.
    """

    def gathering(found: Any) -> Any:
        def all_gather_inputs(parameter: Any) -> Any:
            shard = parameter._sharded_param_data
            if not parameter.offload_to_cpu:
                return found.fget(parameter)
            parameter._sharded_param_data = shard.clone()
            try:
                return found.fget(parameter)
            finally:
                parameter._sharded_param_data = shard

        return property(all_gather_inputs)

    def keeping(found: Any) -> Any:
        def to_sharded_dtensor(parameter: Any, tensor: Tensor) -> Any:
            if parameter.offload_to_cpu:
                # it is a gradient, once it is reduced
                told.is_offloading = True
                tensor = tensor.clone()
                told.is_offloading = False
            return found(parameter, tensor)

        return to_sharded_dtensor

    wrappers = {"all_gather_inputs": gathering, "to_sharded_dtensor": keeping}
    return Patch(_FSDP_PARAM, wrappers).block()


def _n_averaged(group: Any) -> int:
    names = ("shard_mesh_size", "replicate_mesh_size")
    of_shards, of_replicas = (getattr(group.mesh_info, name, None) or 1 for name in names)
    return int(of_shards * of_replicas)


def _has_gradient(parameter: Any) -> bool:
    # made by the first forward pass
    whole = getattr(parameter, "_unsharded_param", None)
    waiting = getattr(parameter, "unsharded_accumulated_grad", None) is not None
    return waiting or (whole is not None and whole.grad is not None)


def _state_of(module: nn.Module) -> Any:
    # of the class: a module looks for what it has not in all its parts
    if not hasattr(type(module), "set_requires_gradient_sync"):
        return None
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    if not (hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")):
        refuse(f"torch.{_GROUPS}", _PURPOSE)
    return state


def _groups_of(state: Any) -> list[Any]:
    # before torch 2.12 a module had one group at most
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
