"""Any operator on the device: run it on host tensors over the same bytes, then bring results back.

No bytes are copied on the way. A result that lies in an argument's memory becomes a view of that
argument; every other result is a new allocation, and all of them are reserved before any exists.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ._blocks import adopt, is_on_device, on_device, on_host, reserve, room_bytes, span_of
from ._dispatch import kernel
from ._machine import machine
from ._mixing import HOST_OUTPUTS, check_host_tensor
from ._races import Span
from ._streams import current_stream
from ._torch_backend import (
    DEVICE_TYPE,
    operator_named,
    required_elements,
    set_geometry,
    tensor_key,
)


@kernel
def run_on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback kernel of the device."""
    return run_as(operator, operator, args, kwargs)


def run_as(
    operator: Any, host_function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `host_function` on the host's view of the arguments of `operator`.

    Raises:
        RuntimeError: the arguments lie on different devices.
        torch.OutOfMemoryError: a result does not fit.
    """
    call = _Call(operator)
    host_args, host_kwargs = call.to_host(args, kwargs)
    if host_function is operator and call.passes_numbers_as_tensors:
        host_function = operator.overloadpacket  # only its overloads know what to do with them
    with _random_numbers(operator), call.undone_on_failure():
        host_result = host_function(*host_args, **host_kwargs)
        result = call.to_device(host_result)
    n_flops = _count_flops(host_function, host_args, host_kwargs, host_result)
    call.launch(n_flops, waits=_reaches_host(operator, result))
    return result


class _Call:
    """One call: its arguments on both sides, and the bytes that it reads and writes."""

    def __init__(self, operator: Any) -> None:
        self._name: str = operator._schema.name
        self._positions: tuple[str, ...] = _argument_names(operator)
        self._writes = _written_arguments(operator)
        self._allocates = _returns_new_tensors(operator)
        self._tensor_names = _tensor_arguments(operator)
        self.passes_numbers_as_tensors = False
        self._owners: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._written: list[torch.Tensor] = []
        self._read_spans: list[Span] = []
        self._written_spans: list[Span] = []

    def to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with a host tensor over the same bytes for each device tensor."""
        named = dict(zip(self._positions, args, strict=False))
        self._writes |= _undeclared_writes(self._name, named)
        host_args = [self._argument(name, value) for name, value in named.items()]
        host_kwargs = {name: self._argument(name, value) for name, value in kwargs.items()}
        return host_args, host_kwargs

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Give the arguments their bytes back if no memory is found for a result.

        A real device allocates before its kernel writes; here the results come first.
        """
        sizes = [
            (alias.untyped_storage(), alias.untyped_storage().nbytes()) for alias in self._written
        ]
        values = [(alias, alias.clone()) for alias in self._written if self._allocates]
        try:
            yield
        except torch.OutOfMemoryError:
            for buffer, n_bytes in sizes:
                buffer.resize_(n_bytes)
            for alias, value in values:
                alias.copy_(value)
            raise

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
        stream = current_stream()
        spans = [*self._read_spans, *self._written_spans]
        machine.launch(self._name, stream, self._read_spans, self._written_spans)
        n_bytes = sum(span.high - span.low for span in spans)
        machine.clock.launch_kernel(stream, n_flops, n_bytes)
        if waits:
            stream.synchronize()

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == DEVICE_TYPE else value
        if isinstance(value, (list, tuple)):
            return [self._argument(name, item) for item in value]
        if name in self._tensor_names and value is not None:
            self.passes_numbers_as_tensors = True
        return value

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_write = name in self._writes
        if not is_on_device(tensor):
            check_host_tensor(tensor, self._name, name, is_write=is_write)
            return tensor
        alias = on_host(tensor)
        self._pairs.append((tensor, alias))
        self._owners[tensor_key(alias)] = tensor
        if is_write:
            self._written.append(alias)
        (self._written_spans if is_write else self._read_spans).append(span_of(tensor))
        return alias

    def _bring_back(self, results: list[Any]) -> list[Any]:
        outgrown = [pair for pair in self._pairs if _outgrew(*pair)]
        new = [alias for _, alias in outgrown]
        tensors = [item for item in results if isinstance(item, torch.Tensor)]
        new += [tensor for tensor in tensors if tensor_key(tensor) not in self._owners]
        buffers = {tensor_key(tensor): tensor.untyped_storage() for tensor in new}
        reserve(buffer.nbytes() for buffer in buffers.values())
        storages = {key: adopt(buffer) for key, buffer in buffers.items()}
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
            self._written_spans.append(span_of(result))
            return result
        return on_device(item, self._owners[key].untyped_storage())


def _outgrew(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Whether the host function resized an argument past the memory of its block."""
    end = alias.storage_offset() + required_elements(alias.size(), alias.stride())
    return end * alias.element_size() > room_bytes(tensor)


@functools.cache
def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


@functools.cache
def _tensor_arguments(operator: Any) -> frozenset[str]:
    arguments = operator._schema.arguments
    return frozenset(a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


@functools.cache
def _written_arguments(operator: Any) -> frozenset[str]:
    arguments = operator._schema.arguments
    return frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def _returns_new_tensors(operator: Any) -> bool:
    return any(returned.alias_info is None for returned in operator._schema.returns)


def _undeclared_writes(name: str, arguments: dict[str, Any]) -> frozenset[str]:
    """What the operator writes although its schema does not say so."""
    if name == "aten::native_batch_norm" and arguments["training"]:
        return frozenset({"running_mean", "running_var"})
    return frozenset()


@contextlib.contextmanager
def _random_numbers(operator: Any) -> Iterator[None]:
    if torch.Tag.nondeterministic_seeded in operator.tags:
        with machine.random.drawing():
            yield
    else:
        yield


def _reaches_host(operator: Any, result: Any) -> bool:
    """Whether the host must wait: it gets a number, or a size that depends on the data."""
    is_number = isinstance(result, (bool, int, float, complex))
    return is_number or torch.Tag.dynamic_output_shape in operator.tags


def _count_flops(host_function: Any, args: list[Any], kwargs: dict[str, Any], result: Any) -> int:
    packet = getattr(host_function, "overloadpacket", host_function)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


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
