"""What is known of an operator before it runs: by its schema and tags, and by what CUDA allows.

That is what it writes, makes, draws and gives to the host, and which host tensors it accepts beside
those on the device. A 0-dim one counts as a number, and a few operators take certain arguments on
the host; all else raises as on CUDA.
"""

import functools
from typing import Any, NoReturn

import torch

from tenure._torch.fakes import unlogged
from tenure._torch.modes import schema_of

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
HOST_OUTPUTS = {"aten::_pack_padded_sequence": {1}}


@functools.cache
def argument_names(operator: Any) -> tuple[str, ...]:
    """Return the names of the arguments, in order."""
    return tuple(argument.name for argument in schema_of(operator).arguments)


@functools.cache
def tensor_arguments(operator: Any) -> frozenset[str]:
    """Return the arguments that are tensors, and may be given as numbers."""
    arguments = schema_of(operator).arguments
    return frozenset(a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


@functools.cache
def written_arguments(operator: Any) -> frozenset[str]:
    """Return the arguments that the operator writes."""
    arguments = schema_of(operator).arguments
    return frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def returns_new_tensors(operator: Any) -> bool:
    """Return whether a result has memory of its own."""
    return any(returned.alias_info is None for returned in schema_of(operator).returns)


def undeclared_writes(name: str, arguments: dict[str, Any]) -> frozenset[str]:
    """Return the arguments that the operator writes although its schema does not say so."""
    if name == "aten::native_batch_norm" and arguments["training"]:
        return frozenset({"running_mean", "running_var"})
    return frozenset()


def draws(operator: Any) -> bool:
    """Return whether the operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def reaches_host(operator: Any, result: Any) -> bool:
    """Return whether the host must wait: it gets a number, or a size that depends on the data."""
    is_number = isinstance(result, (bool, int, float, complex))
    return is_number or torch.Tag.dynamic_output_shape in operator.tags


def count_flops(host_function: Any, args: list[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a call; 0 where torch has no formula."""
    packet = getattr(host_function, "overloadpacket", host_function)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def check_host_tensor(
    tensor: torch.Tensor,
    operator: str,
    argument: str,
    device: torch.device,
    *,
    is_write: bool,
) -> None:
    """Refuse a host tensor among device tensors, with the words of CUDA's error.

    Raises:
        RuntimeError: neither a number nor an argument that this operator takes on the host.
    """
    if (operator, argument) in _ON_HOST or (tensor.dim() == 0 and not is_write):
        return
    refuse_mixing(device, tensor.device, operator, argument)


def refuse_mixing(
    first: torch.device, other: torch.device, operator: str, argument: str
) -> NoReturn:
    """Raise as CUDA does where the tensors of an operation lie on two devices."""
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices,"
        f" {first} and {other}! (when checking argument {argument} in method {operator})"
    )
