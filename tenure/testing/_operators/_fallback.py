"""Any operator on the device: run it on host tensors over the same bytes, then bring results back.

No bytes are copied on the way. A result that lies in an argument's memory becomes a view of that
argument; every other result is a new allocation, and all of them are reserved before any exists.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
from .._device._host_memory import POISON, bytes_in
from .._device._machine import DeviceRandom, machine
from .._device._races import Span
from .._device._streams import Stream, current_stream
from .._device._which import index_of
from .._torch_backend import (
    DEVICE_TYPE,
    kernel,
    operator_named,
    required_elements,
    set_geometry,
    sim_device,
    tensor_key,
)
from ._schemas import (
    HOST_OUTPUTS,
    argument_names,
    check_host_tensor,
    count_flops,
    draws,
    reaches_host,
    refuse_mixing,
    returns_new_tensors,
    tensor_arguments,
    undeclared_writes,
    written_arguments,
)

# `.item()` launches no kernel, and torch looks at the last error after launches only.
_COPY_OF_ONE_NUMBER = "aten::_local_scalar_dense"


@kernel
def run_on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the fallback kernel of the device."""
    return run_as(operator, operator, args, kwargs)


def run_as(operator: Any, host_function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `host_function` on the host's view of the arguments of `operator`.

    Raises:
        RuntimeError: the arguments lie on different devices.
        torch.OutOfMemoryError: a result does not fit.
    """
    call = _HostCall(operator)
    host_args, host_kwargs = call.to_host(args, kwargs)
    if host_function is operator and call.passes_numbers_as_tensors:
        # Only the packet chooses the overload that takes them.
        host_function = operator.overloadpacket
    graph = call.stream.capture
    is_captured = graph is not None
    numbers = _random_numbers(operator, call.random, moves=not is_captured)
    with call.undone(always=is_captured), numbers:
        host_result = host_function(*host_args, **host_kwargs)
        result = call.to_device(host_result)
    n_flops = count_flops(host_function, host_args, host_kwargs, host_result)
    waits = reaches_host(operator, result)
    if graph is None:
        call.launch(n_flops, waits=waits)
        return result
    if waits:
        graph.fail()
    # Taken out of the call, which would keep its tensors allocated for as long as the graph.
    random, arguments = call.random, call.storage_keys

    def run_again() -> None:
        with _random_numbers(operator, random):
            made = host_function(*host_args, **host_kwargs)
        for old, new in zip(targets, _new_storages(made, arguments), strict=True):
            bytes_in(old).copy_(bytes_in(new))

    targets = _new_storages(host_result, arguments)
    for storage in targets:
        bytes_in(storage).fill_(POISON)
    graph.add(run_again, call.read_spans, call.written_spans, n_flops)
    return result


class _HostCall:
    """One call: its arguments on both sides, its device, and the bytes that it reads and writes."""

    def __init__(self, operator: Any) -> None:
        self._name: str = schema_of(operator).name
        self._positions: tuple[str, ...] = argument_names(operator)
        self._writes = written_arguments(operator)
        self._allocates = returns_new_tensors(operator)
        self._tensor_names = tensor_arguments(operator)
        self.passes_numbers_as_tensors = False
        self._device: torch.device | None = None
        self._on_host: list[tuple[str, torch.Tensor]] = []
        self._owners: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._written: list[torch.Tensor] = []
        self.read_spans: list[Span] = []
        self.written_spans: list[Span] = []

    def to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with a host tensor over the same bytes for each device tensor."""
        named = dict(zip(self._positions, args, strict=False))
        self._writes |= undeclared_writes(self._name, named)
        host_args = [self._argument(name, value) for name, value in named.items()]
        host_kwargs = {name: self._argument(name, value) for name, value in kwargs.items()}
        self._device = sim_device(index_of(self._device))
        for name, tensor in self._on_host:
            is_write = name in self._writes
            check_host_tensor(tensor, self._name, name, self._device, is_write=is_write)
        return host_args, host_kwargs

    @property
    def stream(self) -> Stream:
        """The current stream of the call's device."""
        return current_stream(self._device)

    @property
    def random(self) -> DeviceRandom:
        """The generator of the call's device."""
        return machine.devices[index_of(self._device)].random

    @property
    def storage_keys(self) -> set[int]:
        """The storages of the arguments on the device."""
        return set(self._owners)

    @contextlib.contextmanager
    def undone(self, *, always: bool) -> Iterator[None]:
        """Give the arguments their bytes back if no memory is found for a result, or `always`.

        A real device allocates before its kernel writes; here the results come first.
        """
        keeps = always or self._allocates
        sizes = [
            (alias.untyped_storage(), alias.untyped_storage().nbytes()) for alias in self._written
        ]
        values = [(alias, alias.clone()) for alias in self._written if keeps]
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            for buffer, n_bytes in sizes:
                buffer.resize_(n_bytes)
            always = True
            raise
        finally:
            if always:
                for alias, value in values:
                    alias.copy_(value)

    def to_device(self, result: Any) -> Any:
        """Bring a result back: the tensors of it that are new are reserved together."""
        if isinstance(result, torch.Tensor):
            return self._bring_back([result])[0]
        if not isinstance(result, (list, tuple)):
            return result
        stay = HOST_OUTPUTS.get(self._name, set())
        moved = [item for index, item in enumerate(result) if index not in stay]
        brought = iter(self._bring_back(moved))
        items = [item if index in stay else next(brought) for index, item in enumerate(result)]
        return items if isinstance(result, list) else tuple(items)

    def launch(self, n_flops: int, *, waits: bool) -> None:
        """Put the call on the current stream; `waits` stops the host until it is done."""
        stream = self.stream
        spans = [*self.read_spans, *self.written_spans]
        machine.launch(self._name, stream, self.read_spans, self.written_spans)
        n_bytes = sum(span.high - span.low for span in spans)
        machine.clock.launch_kernel(stream, n_flops, n_bytes)
        if self._name != _COPY_OF_ONE_NUMBER:
            last_error.check()
        if waits:
            stream.synchronize()

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, torch.device):
            return self._place(value)
        if isinstance(value, (list, tuple)):
            return [self._argument(name, item) for item in value]
        if name in self._tensor_names and value is not None:
            self.passes_numbers_as_tensors = True
        return value

    def _place(self, device: torch.device) -> torch.device:
        """Return the host for a device; one without tensors of its own takes the call."""
        if device.type != DEVICE_TYPE:
            return device
        if self._device is None:
            self._device = sim_device(index_of(device))
        return torch.device("cpu")

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_write = name in self._writes
        if not is_on_device(tensor):
            self._on_host.append((name, tensor))
            return tensor
        if self._device is not None and self._device != tensor.device:
            refuse_mixing(self._device, tensor.device, self._name, name)
        self._device = tensor.device
        alias = on_host(tensor)
        self._pairs.append((tensor, alias))
        self._owners[tensor_key(alias)] = tensor
        if is_write:
            self._written.append(alias)
        (self.written_spans if is_write else self.read_spans).append(span_of(tensor))
        return alias

    def _bring_back(self, results: list[Any]) -> list[Any]:
        new = [alias for tensor, alias in self._pairs if _outgrew(tensor, alias)]
        tensors = [item for item in results if isinstance(item, torch.Tensor)]
        new += [tensor for tensor in tensors if tensor_key(tensor) not in self._owners]
        buffers = {tensor_key(tensor): tensor.untyped_storage() for tensor in new}
        index = index_of(self._device)
        taken = reserve((buffer.nbytes() for buffer in buffers.values()), index)
        pairs = zip(buffers.items(), taken, strict=True)
        storages = {key: adopt(buffer, place, index) for (key, buffer), place in pairs}
        self._follow_resizes(storages)
        return [self._result(item, storages) for item in results]

    def _follow_resizes(self, storages: dict[int, torch.UntypedStorage]) -> None:
        for tensor, alias in self._pairs:
            if alias.size() != tensor.size() or alias.stride() != tensor.stride():
                storage = storages.get(tensor_key(alias), tensor.untyped_storage())
                geometry = (alias.size(), alias.stride(), alias.storage_offset())
                set_geometry(tensor, storage, *geometry)

    def _result(self, item: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        for tensor, alias in self._pairs:
            if item is alias:
                return tensor
        key = tensor_key(item)
        if key in storages:
            result = on_device(item, storages[key])
            self.written_spans.append(span_of(result))
            return result
        return on_device(item, self._owners[key].untyped_storage())


def _outgrew(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Return whether the host function resized an argument past the memory of its block."""
    end = alias.storage_offset() + required_elements(alias.size(), alias.stride())
    return end * alias.element_size() > room_bytes(tensor)


@contextlib.contextmanager
def _random_numbers(operator: Any, random: DeviceRandom, *, moves: bool = True) -> Iterator[None]:
    """Let the operator draw from the generator of its device, if it draws."""
    if draws(operator):
        with random.drawing(moves=moves):
            yield
    else:
        yield


def _new_storages(result: Any, arguments: set[int]) -> list[torch.UntypedStorage]:
    """Return the storages of a result that are those of no argument, once each."""
    items = result if isinstance(result, (list, tuple)) else [result]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    found = {tensor_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return [storage for key, storage in found.items() if key not in arguments]


def _whole(name: str) -> Callable[..., Any]:
    return functools.partial(run_on_host, operator_named(name))


# Torch would compose the first four out of smaller operators, where CUDA runs one kernel; it would
# run the losses by their out= form, which warns of a resize that no caller asked for.
WHOLE_KERNELS = {
    name: _whole(name)
    for name in (
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "mse_loss",
        "smooth_l1_loss",
    )
}
