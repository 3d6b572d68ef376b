"""How many bytes a kernel takes beyond its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import UntypedStorage

from tenure._containers import passed_tensors
from tenure._torch.storages import key_of

from .._exchanges import is_exchange
from ._collectives import collective_bytes, is_copy
from ._formulas import FORMULAS
from ._kinds import FREE, FREE_CONTIGUOUS, FREE_OF_ONE_DTYPE, MEASURED, TAKES_NUMBERS
from ._matmuls import RULES as MATMULS
from ._measured import WHOLE_PRODUCT_BYTES, measured


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that a kernel takes for itself while it runs.

    Attributes:
        n_bytes: the peak of what is live inside of it, beyond its inputs and its outputs.
        reason: None where that is exact or a little too high; else why it is only an estimate.
        is_kept: whether it is let go of later, by a thread: when the second one after it has some.
    """

    n_bytes: int
    reason: str | None = None
    is_kept: bool = False


_aten = torch.ops.aten
_NOTHING = Scratch(0)
_Rule = Callable[[Any, Any, Any, Any], Scratch]
_rules: dict[Any, _Rule] = {}
_BY_VALUE = "what it takes for itself depends on the values that it gets"
_BY_THREADS = "threads that exchange with other ranks let go of memory at moments of their own"
_SEES_VALUES = frozenset({_aten.isin.Tensor_Tensor})

_HALVES = frozenset({torch.bfloat16, torch.float16})
_BY_ONEDNN = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList})
# they divide by a number of elements
_MEANS = frozenset({_aten.mean.default, _aten.mean.dim})
_MASKS_AND_INDICES = frozenset({torch.bool, torch.int64})


def scratch_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    """Say how many bytes the real kernel of an operation takes for itself on the CPU.

    Args:
        func: an operation, as a dispatch mode gets it.
        args: its arguments; of tensors, which may be fake, only their layouts are looked at.
        kwargs: its arguments by name.
        result: what it gave; storages in it that are not in the arguments count as its outputs.
    """
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _rule_for(func)
    if rule is not _nothing and any(
        each.layout is not torch.strided for each in passed_tensors((args, kwargs, result))
    ):
        return Scratch(0, f"nobody has measured what {func} takes for itself on sparse tensors")
    return rule(func, args, kwargs, result)


def _rule_for(func: Any) -> _Rule:
    namespace, _, name = str(func).partition(".")
    # marks of profilers, questions about tensors
    if namespace in {"profiler", "prim"}:
        return _nothing
    if is_exchange(func) or is_copy(func):
        return _of_collective
    if namespace != "aten":
        return lambda *_: Scratch(0, f"nobody has measured what {func} takes for itself")
    if func in MATMULS:
        return _of_matmul
    if func in FORMULAS:
        return _by_formula
    if func in _MEANS | _SUMS:
        return _of_sum
    if func is _aten._linalg_check_errors.default:
        return _with_numbers
    if func is _aten.masked_select.default:
        return _two_numbers_an_element
    if name.startswith(("_foreach_", "_fused_")) and name.partition(".")[0].endswith("_"):
        return _with_numbers
    if torch.Tag.pointwise in func.tags and name.partition(".")[0].endswith("_"):
        return _with_numbers_of_one_dtype
    # they multiply by a number of their own
    if name in {"deg2rad.default", "rad2deg.default"}:
        return _with_numbers
    if name in TAKES_NUMBERS:
        return _with_numbers if name in FREE else _with_numbers_of_one_dtype
    if name in FREE:
        return _nothing
    if name in FREE_OF_ONE_DTYPE:
        return _of_one_dtype
    if name in FREE_CONTIGUOUS:
        return _contiguous
    return _measured if name in MEASURED else _never_compared


def _nothing(*_: Any) -> Scratch:
    return _NOTHING


def _of_collective(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    n_bytes = collective_bytes(func, args, kwargs, result)
    if is_copy(func):
        return Scratch(n_bytes)
    return Scratch(n_bytes, _BY_THREADS, is_kept=True)


def _with_numbers(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    """A number becomes a tensor of 8 bytes (16 if complex), and another of the common dtype."""
    tensors = [*passed_tensors((args, kwargs, result))]
    size = max((each.dtype.itemsize for each in tensors), default=8)
    return Scratch(2 * size if size > 8 else 8 + size)


def _with_numbers_of_one_dtype(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    if not _have_one_dtype(args, kwargs, result):
        return _measured(func, args, kwargs, result)
    # of two tensors none is made
    if not any(type(each) in (int, float, complex) for each in args[1:]):
        return _NOTHING
    return _with_numbers(func, args, kwargs, result)


def _of_sum(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    if not _have_one_dtype(args, kwargs, result):
        return _measured(func, args, kwargs, result)
    # 16 bits are summed in 32, from a copy; a whole sum has a part for each thread
    copied = args[0].numel() + result.numel() if args[0].dtype in _HALVES else 0
    parts = (
        torch.get_num_threads() * 4 if result.numel() == 1 and torch.get_num_threads() > 1 else 0
    )
    number = 8 + args[0].element_size() if func in _MEANS else 0
    return Scratch(4 * copied + number + parts * args[0].element_size() // 4)


def _of_one_dtype(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    if _have_one_dtype(args, kwargs, result):
        return _NOTHING
    return _measured(func, args, kwargs, result)


def _have_one_dtype(args: Any, kwargs: Any, result: Any) -> bool:
    dtypes = {each.dtype for each in passed_tensors((args, kwargs))}
    made = {each.dtype for each in passed_tensors(result)}
    return (
        len(dtypes) == 1 and made <= {*dtypes, torch.bool} and next(iter(dtypes)).is_floating_point
    )


def _contiguous(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    tensors = [*passed_tensors((args, kwargs))]
    dtypes = {each.dtype for each in tensors} - _MASKS_AND_INDICES
    if len(dtypes) == 1 and all(each.is_contiguous() for each in tensors):
        return _NOTHING
    return _measured(func, args, kwargs, result)


def _of_matmul(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    tensors = [*passed_tensors((args, result))]
    n_bytes = MATMULS[func](args)
    if tensors[0].dtype in _HALVES:
        taken = sum(each.numel() * each.element_size() for each in tensors)
        n_bytes = None if taken <= WHOLE_PRODUCT_BYTES else n_bytes
    return _measured(func, args, kwargs, result) if n_bytes is None else Scratch(n_bytes)


def _measured(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    n_bytes = measured(func, args, kwargs, result, _made_bytes(args, kwargs, result))
    if isinstance(n_bytes, int):
        lazy = [each for each in passed_tensors((args, kwargs)) if each.is_conj() or each.is_neg()]
        n_bytes += sum(each.numel() * each.element_size() for each in lazy)
        if func in _BY_ONEDNN and any(each.dtype in _HALVES for each in passed_tensors(args)):
            # its buffers for 16 bits grow in steps: seen up to 5 % above what was measured
            n_bytes += n_bytes // 10
        return Scratch(n_bytes, _BY_VALUE if func in _SEES_VALUES else None)
    return Scratch(0, f"what {func} takes for itself can't be measured ({n_bytes})")


def _never_compared(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    """An operation of torch that is in no list; most pointwise ones and views take nothing."""
    if torch.Tag.pointwise in func.tags:
        return _with_numbers_of_one_dtype(func, args, kwargs, result)
    # nor is it run: a kernel may trust what it is given, and made-up tensors end the process
    return Scratch(0, f"nobody has measured what {func} takes for itself")


def _by_formula(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    tensors = [*passed_tensors((args, kwargs, result))]
    if kwargs or any(each.layout is not torch.strided for each in tensors):
        return Scratch(0, f"nobody has measured what {func} takes for itself called in this way")
    return Scratch(FORMULAS[func](args, result))


def _two_numbers_an_element(func: Any, args: Any, kwargs: Any, result: Any) -> Scratch:
    """The mask as whole numbers, and their running sum."""
    return Scratch(2 * 8 * torch.broadcast_shapes(args[0].shape, args[1].shape).numel())


def _made_bytes(args: Any, kwargs: Any, result: Any) -> int:
    """Bytes of the storages that an operation made."""
    before = {key_of(each) for each in _storages((args, kwargs))}
    made = {key_of(each): each.nbytes() for each in _storages(result)}
    return sum(n_bytes for key, n_bytes in made.items() if key not in before)


def _storages(tree: Any) -> Iterator[UntypedStorage]:
    return (each.untyped_storage() for each in passed_tensors(tree))
