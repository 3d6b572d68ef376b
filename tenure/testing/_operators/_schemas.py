"""What an operator's schema and tags tell: what it writes, makes, draws and gives to the host."""

import functools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


@functools.cache
def argument_names(operator: Any) -> tuple[str, ...]:
    """The names of the arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


@functools.cache
def tensor_arguments(operator: Any) -> frozenset[str]:
    """The arguments that are tensors, and may be given as numbers."""
    arguments = operator._schema.arguments
    return frozenset(a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


@functools.cache
def written_arguments(operator: Any) -> frozenset[str]:
    """The arguments that the operator writes."""
    arguments = operator._schema.arguments
    return frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def returns_new_tensors(operator: Any) -> bool:
    """Whether a result has memory of its own."""
    return any(returned.alias_info is None for returned in operator._schema.returns)


def undeclared_writes(name: str, arguments: dict[str, Any]) -> frozenset[str]:
    """What the operator writes although its schema does not say so."""
    if name == "aten::native_batch_norm" and arguments["training"]:
        return frozenset({"running_mean", "running_var"})
    return frozenset()


def draws(operator: Any) -> bool:
    """Whether the operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


@functools.cache
def may_reach_host(operator: Any) -> bool:
    """Whether `reaches_host` may say yes."""
    returns = [str(returned.type) for returned in operator._schema.returns]
    gives_numbers = any("Tensor" not in kind for kind in returns)
    return gives_numbers or torch.Tag.dynamic_output_shape in operator.tags


def reaches_host(operator: Any, result: Any) -> bool:
    """Whether the host must wait: it gets a number, or a size that depends on the data."""
    is_number = isinstance(result, (bool, int, float, complex))
    return is_number or torch.Tag.dynamic_output_shape in operator.tags


def count_flops(host_function: Any, args: list[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a call; 0 where torch has no formula."""
    packet = getattr(host_function, "overloadpacket", host_function)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
