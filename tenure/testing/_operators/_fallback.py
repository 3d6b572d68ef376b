"""Any operator on the device: run it on host tensors over the same bytes, then bring results back.

No bytes are copied on the way. A result that lies in an argument's memory becomes a view of that
argument; every other result is a new allocation, and all of them are reserved before any exists.

Host tensors may take part as on CUDA: a 0-dim one counts as a number, and a few operators take
certain arguments on the host; all else raises.
"""

import functools
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from tenure._torch.fakes import unlogged
from tenure._torch.modes import schema_of

from .._allocator._runtime import last_error
from .._device._blocks import (
    adopt,
    is_on_device,
    on_device,
    on_host,
    reserve,
    room_bytes,
    span_of,
)
from .._device._host_memory import extent_bytes
from .._device._machine import machine
from .._device._races import Span
from .._device._streams import current_stream
from .._device._which import index_of
from .._torch_backend import (
    DEVICE_TYPE,
    kernel,
    operator_named,
    set_geometry,
    sim_device,
    tensor_key,
)

# it warns where a torch for GPUs is without triton
with unlogged("torch.utils.flop_counter"):
    from torch.utils.flop_counter import flop_registry

_ON_HOST = {
    ("aten::index", "indices"),
    ("aten::_unsafe_index", "indices"),
    ("aten::index_put", "indices"),
    ("aten::index_put_", "indices"),
    ("aten::_index_put_impl_", "indices"),
    ("aten::_unsafe_index_put", "indices"),
    ("aten::_pack_padded_sequence", "lengths"),
    ("aten::_pack_padded_sequence_backward", "batch_sizes"),
    ("aten::_pad_packed_sequence", "batch_sizes"),
    ("aten::_ctc_loss", "input_lengths"),
    ("aten::_ctc_loss", "target_lengths"),
}
# Outputs that stay on the host, by position.
_HOST_OUTPUTS = {"aten::_pack_padded_sequence": {1}}
# `.item()` launches no kernel, and torch looks at the last error after launches only.
_COPY_OF_ONE_NUMBER = "aten::_local_scalar_dense"


@kernel()
def run_on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the host's view of its arguments; the fallback kernel of the device.

    Raises:
        RuntimeError: the arguments lie on different devices.
        torch.OutOfMemoryError: a result does not fit.
    """
    facts = _facts_of(operator)
    call = _HostCall(facts)
    host_args, host_kwargs = call.to_host(args, kwargs)
    # Only the packet chooses the overload that takes numbers in place of tensors.
    host_function = operator.overloadpacket if call.passes_numbers_as_tensors else operator
    # A real device allocates before its kernel writes; here the results come first.
    keeps = [(alias, alias.untyped_storage().nbytes()) for alias in call.written]
    values = [alias.clone() for alias in call.written if facts.allocates]
    try:
        with machine.devices[call.index].random.drawing() if facts.draws else nullcontext():
            host_result = host_function(*host_args, **host_kwargs)
            result = call.to_device(host_result)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        for alias, n_bytes in keeps:
            alias.untyped_storage().resize_(n_bytes)
        for alias, value in zip(call.written, values, strict=False):
            alias.copy_(value)
        raise
    count = flop_registry.get(operator.overloadpacket)
    n_flops = int(count(*host_args, **host_kwargs, out_val=host_result)) if count else 0
    stream, spans = current_stream(call.index), [*call.reads, *call.writes]
    machine.launch(facts.name, stream, call.reads, call.writes)
    machine.clock.launch_kernel(stream, n_flops, sum(span.high - span.low for span in spans))
    if facts.name != _COPY_OF_ONE_NUMBER:
        last_error.check()
    # The host gets a number, or a size that depends on the data.
    if facts.sizes_by_data or isinstance(result, (bool, int, float, complex)):
        stream.synchronize()
    return result


class _StorageFacts:
    """What the schema and the tags of an operator say of it.

    Attributes:
        numbers: the arguments that are tensors, and may be given as numbers.
        writes: the arguments that it writes.
        allocates: whether a result has memory of its own.
        draws: whether it takes random numbers.
        sizes_by_data: whether the size of a result depends on the data.
    """

    def __init__(self, operator: Any) -> None:
        schema = schema_of(operator)
        self.name: str = schema.name
        self.names = tuple(a.name for a in schema.arguments)
        tensors = "Tensor", "Optional[Tensor]"
        self.numbers = {a.name for a in schema.arguments if str(a.type) in tensors}
        self.writes = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        self.allocates = any(returned.alias_info is None for returned in schema.returns)
        self.draws = torch.Tag.nondeterministic_seeded in operator.tags
        self.sizes_by_data = torch.Tag.dynamic_output_shape in operator.tags


_facts_of = functools.cache(_StorageFacts)


class _HostCall:
    """One call: its arguments on both sides, its device, and the bytes that it reads and writes."""

    def __init__(self, facts: _StorageFacts) -> None:
        self._facts = facts
        self._writes = facts.writes
        self.passes_numbers_as_tensors = False
        self._device: torch.device | None = None
        self._on_host: list[tuple[str, torch.Tensor]] = []
        self._owners: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: list[torch.Tensor] = []
        self.reads: list[Span] = []
        self.writes: list[Span] = []

    def to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with a host tensor over the same bytes for each device tensor."""
        named = dict(zip(self._facts.names, args, strict=False))
        if self._facts.name == "aten::native_batch_norm" and named["training"]:
            # Its schema does not say so.
            self._writes = {"running_mean", "running_var"}
        host_args = [self._argument(name, value) for name, value in named.items()]
        host_kwargs = {name: self._argument(name, value) for name, value in kwargs.items()}
        self.index = index_of(self._device)
        for name, tensor in self._on_host:
            is_number = tensor.dim() == 0 and name not in self._writes
            if not is_number and (self._facts.name, name) not in _ON_HOST:
                self._refuse(sim_device(self.index), tensor.device, name)
        return host_args, host_kwargs

    def to_device(self, result: Any) -> Any:
        """Bring a result back: the tensors of it that are new are reserved together."""
        several = isinstance(result, (list, tuple))
        items = list(result) if several else [result]
        stay = _HOST_OUTPUTS.get(self._facts.name, ())
        moved = {
            place: item
            for place, item in enumerate(items)
            if isinstance(item, torch.Tensor) and place not in stay
        }
        storages = self._adopt(list(moved.values()))
        for tensor, alias in self._pairs:
            if alias.size() != tensor.size() or alias.stride() != tensor.stride():
                storage = storages.get(tensor_key(alias), tensor.untyped_storage())
                geometry = (alias.size(), alias.stride(), alias.storage_offset())
                set_geometry(tensor, storage, *geometry)
        for place, item in moved.items():
            items[place] = self._result(item, storages)
        if not several:
            return items[0]
        return items if isinstance(result, list) else tuple(items)

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            # One without tensors of its own takes the call.
            self._device = self._device or sim_device(index_of(value))
            return torch.device("cpu")
        if isinstance(value, (list, tuple)):
            return [self._argument(name, item) for item in value]
        self.passes_numbers_as_tensors |= name in self._facts.numbers and value is not None
        return value

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not is_on_device(tensor):
            self._on_host.append((name, tensor))
            return tensor
        if self._device is not None and self._device != tensor.device:
            self._refuse(self._device, tensor.device, name)
        self._device = tensor.device
        alias = on_host(tensor)
        self._pairs.append((tensor, alias))
        self._owners[tensor_key(alias)] = tensor
        if name in self._writes:
            self.written.append(alias)
        (self.writes if name in self._writes else self.reads).append(span_of(tensor))
        return alias

    def _refuse(self, first: torch.device, other: torch.device, argument: str) -> NoReturn:
        """Raise as CUDA does where the tensors of an operation lie on two devices."""
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {first} and {other}! (when checking argument {argument} in method"
            f" {self._facts.name})"
        )

    def _adopt(self, results: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Make the new storages of results, and of arguments that grew, into device memory."""
        new = [alias for tensor, alias in self._pairs if _outgrew(tensor, alias)]
        new += [tensor for tensor in results if tensor_key(tensor) not in self._owners]
        buffers = {tensor_key(tensor): tensor.untyped_storage() for tensor in new}
        taken = reserve((buffer.nbytes() for buffer in buffers.values()), self.index)
        pairs = zip(buffers.items(), taken, strict=True)
        return {key: adopt(buffer, place, self.index) for (key, buffer), place in pairs}

    def _result(
        self, item: torch.Tensor, storages: dict[int, torch.UntypedStorage]
    ) -> torch.Tensor:
        for tensor, alias in self._pairs:
            if item is alias:
                return tensor
        key = tensor_key(item)
        if key not in storages:
            return on_device(item, self._owners[key].untyped_storage())
        result = on_device(item, storages[key])
        self.writes.append(span_of(result))
        return result


def _outgrew(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Return whether the host function resized an argument past the memory of its block."""
    low = int(alias.storage_offset()) * alias.element_size()
    return low + extent_bytes(alias) > room_bytes(tensor)


# Torch would compose the first four out of smaller operators, where CUDA runs one kernel; it would
# run the losses by their out= form, which warns of a resize that no caller asked for.
for _name in (
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "mse_loss",
    "smooth_l1_loss",
):
    kernel(_name)(functools.partial(run_on_host, operator_named(_name)))
