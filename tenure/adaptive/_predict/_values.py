"""The results of operations whose kernels without data don't give them, as they depend on values.

Programs ask their data for few whole numbers: lengths, masks, positions and counts. The values of
small tensors of these are computed along with the work, beside the tensors without data. Where they
are not known, a result is the largest that there can be, or a guess where a number steers the
program. See Note [Layouts in predictions], rule 4.

Invariant: a storage is known whole or not at all; what writes unknown values into it ends that. No
operation between ranks reaches a process group, so that a rank may predict alone: the result has
the shape and the memory of the real one, and unknown values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage

from tenure._containers import mapped, passed_tensors
from tenure._errors import PredictionError
from tenure._storages import inner_tensors, sparse_parts
from tenure._torch.fakes import NEEDS_DATA, UNKNOWN, is_fake, like, mode_of, no_fakes
from tenure._torch.modes import schema_of
from tenure._torch.sharding import done_work, is_dtensor
from tenure._torch.storages import key_of

from ._device import EXCHANGES, OF_GROUPS, RECURRENT

_HOST = torch.device("cpu")
_LARGEST_BYTES = 2**20
"""Of a storage; a million of them take no time that a prediction would show."""
_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_DECIDES = {
    _aten.bitwise_or.Tensor: True,
    _aten.logical_or.default: True,
    _aten.bitwise_and.Tensor: False,
    _aten.logical_and.default: False,
}
"""The value with which one operand decides."""


class KnownValues:
    """The storages whose values are known, as copies in host memory.

    Attributes:
        held_bytes: what these copies take, which is not memory of the work.
    """

    def __init__(self) -> None:
        self._real: dict[int, UntypedStorage] = {}
        self.held_bytes = 0

    def learn(self, fake: Tensor, real: Tensor) -> None:
        """Remember what a tensor held before the work, if it is small and of whole numbers."""
        if _is_eligible(fake) and real.device.type != "meta":
            with no_fakes():
                self._enter(fake, real.detach().to(_HOST).untyped_storage().clone())

    def value(self, fake: Any) -> Tensor | None:
        """Return the values of a tensor, if they are known; only read them."""
        if fake.layout is not torch.strided:
            return None
        storage = self._real.get(key_of(fake.untyped_storage()))
        # the mode's own value of a number, as of ``torch.tensor(1.0)``
        constant: Tensor | None = getattr(fake, "constant", None)
        with no_fakes():
            if storage is None:
                return None if constant is None else constant.clone()
            empty: Any = torch.empty(0, dtype=fake.dtype, device=_HOST)
            shown: Tensor = empty.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
            return shown

    def n_true(self, mask: Tensor) -> int | None:
        """Return how many elements of a mask are true, if that is known."""
        value = self.value(mask)
        with no_fakes():
            return None if value is None else int(value.count_nonzero())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on known tensors; None if one is not known.

        None of an exchange, too: the other ranks would have to take part.
        """
        real: dict[int, Tensor] = {}
        for fake in filter(is_fake, passed_tensors((args, kwargs))):
            value = self.value(fake)
            if value is None:
                return None
            real[id(fake)] = value
        if is_exchange(func):
            return None
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _HOST}
        with no_fakes(), torch.no_grad():
            args, kwargs = mapped(lambda each: real.get(id(each), each), (args, kwargs))
            result = func(*args, **kwargs)
        # what writes lists of tensors in place gives nothing
        return () if result is None else result

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Do an operation for the values as well, where all that it reads is known."""
        # a scaler steps its optimizer where all gradients are finite: that takes more
        if func is _UNSCALE:
            return
        made = [each for each in passed_tensors(result) if is_fake(each)]
        written = _written(func, args, kwargs)
        if not written and not any(map(_is_eligible, made)):
            return
        known = None
        if torch.Tag.nondeterministic_seeded not in func.tags:
            try:
                known = self.run(func, args, kwargs)
            # a kernel that wants what no host has: the values are not known then
            except (RuntimeError, NotImplementedError):
                known = None
        if known is None and not written:
            known = self._decided_by_one(func, args, result)
        if known is None:
            for storage in (each for tensor in written for each in storages_of(tensor)):
                self._forget(key_of(storage))
            return
        for fake, real in zip(made, passed_tensors(known), strict=False):
            same = fake.shape == real.shape and fake.stride() == real.stride()
            if same and _is_eligible(fake) and key_of(fake.untyped_storage()) not in self._real:
                self._enter(fake, real.untyped_storage())

    def _decided_by_one(self, func: Any, args: Any, result: Any) -> Tensor | None:
        """Return the result of "or" with all true, or "and" with all false.

        Loops that end at a length, or when all have said their end, are to end: that is what
        ``generate()`` of transformers asks.
        """
        decides = _DECIDES.get(func)
        if decides is None or (decides and result.dtype is not torch.bool):
            return None
        for each in filter(is_fake, passed_tensors(args)):
            if self.n_true(each) == (each.numel() if decides else 0):
                with no_fakes():
                    return torch.full(result.shape, decides, dtype=result.dtype)
        return None

    def _enter(self, fake: Tensor, real: UntypedStorage) -> None:
        storage = fake.untyped_storage()
        if storage.nbytes() == real.nbytes():
            key = key_of(storage)
            self._forget(key)
            self._real[key] = real
            self.held_bytes += real.nbytes()
            finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        real = self._real.pop(key, None)
        self.held_bytes -= 0 if real is None else real.nbytes()


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages of a tensor of any layout, with data or without."""
    if is_dtensor(tensor):
        return [storage for part in inner_tensors(tensor) for storage in storages_of(part)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for _, part in sparse_parts(tensor)]


def _is_eligible(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return (whole or tensor.numel() == 1) and tensor.untyped_storage().nbytes() <= _LARGEST_BYTES


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    # their schemas don't tell
    if is_exchange(func):
        return [*passed_tensors(args[:1])]
    schema = schema_of(func)
    if schema is None or not schema.is_mutable:
        return []
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [*passed_tensors(values)]


# --- results of operations that raise on tensors without data

_Result = tuple[Any, str | None]
_EVERYTHING = "a mask is taken to select everything"
_FALSE = "a condition on values is taken to be false"
CAN_NOT: tuple[type[Exception], ...] = (*NEEDS_DATA, UNKNOWN)
"""The errors that operations raise on tensors without data."""


def worked_out(
    func: Any, args: Any, kwargs: Any, known: KnownValues, error: BaseException
) -> _Result:
    """Return the result of an operation that raised, and what it assumes of values, if anything.

    Args:
        func: the operation.
        args: its arguments, tensors without data.
        kwargs: the others.
        known: values.
        error: what it raised.

    Raises:
        PredictionError: nothing can be said.
    """
    real = known.run(func, args, kwargs)
    if real is not None:
        return _without_data(real, next(passed_tensors(args), None), known), None
    if func is _aten.index.Tensor:
        return _index(args[0], args[1], known)
    if func is _aten.masked_select.default:
        return _masked_select(args[0], args[1], known)
    make = _LARGEST.get(func)
    if make is None:
        what = "no shape is known of it" if isinstance(error, UNKNOWN) else "it depends on values"
        raise PredictionError(
            f"The memory of this work can't be predicted: it calls {func}, and {what}. Predict the "
            "rest without that part, or run it once and see."
        ) from error
    return make(args[0])


def _without_data(real: Any, first: Any, known: KnownValues) -> Any:
    if isinstance(real, list | tuple):
        return type(real)(_without_data(each, first, known) for each in real)
    if not isinstance(real, Tensor):
        return real
    fake = like(real, mode_of(first), first.device)
    known.learn(fake, real)
    return fake


def _item(tensor: Tensor) -> _Result:
    if tensor.dtype is torch.bool:
        return False, _FALSE
    # a loss that is logged: sizes are no floats
    if tensor.dtype.is_floating_point:
        return 1.0, None
    return 1, "a number is taken to be 1"


def _nonzero(tensor: Tensor) -> _Result:
    found = tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    return found, "all elements are taken to be nonzero"


def _unique(tensor: Tensor) -> _Result:
    counts = tensor.new_empty(tensor.numel(), dtype=torch.int64)
    places = torch.empty_like(tensor, dtype=torch.int64)
    return (tensor.new_empty(tensor.numel()), places, counts), "all elements are taken to differ"


_LARGEST: dict[Any, Callable[[Tensor], _Result]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: lambda _: (False, _FALSE),
    _aten.nonzero.default: _nonzero,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
}


def _masked_select(tensor: Tensor, mask: Tensor, known: KnownValues) -> _Result:
    n_elements = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    n_true = known.n_true(mask)
    if n_true is None:
        return tensor.new_empty(n_elements), _EVERYTHING
    return tensor.new_empty(n_true * n_elements // max(mask.numel(), 1)), None


def _index(tensor: Tensor, indices: list[Tensor | None], known: KnownValues) -> _Result:
    """Return the number of true elements of a mask, or of all if they are not known."""
    columns: list[Tensor | None] = []
    reason = None
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            columns.append(index)
            continue
        n_selected = known.n_true(index)
        if n_selected is None:
            n_selected, reason = index.numel(), _EVERYTHING
        columns += [index.new_empty(n_selected, dtype=torch.int64)] * index.dim()
    return _aten.index.Tensor(tensor, columns), reason


# --- where torch knows no shape, or not all memory


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    # torch's own asks for what CUDA's kernel asks for
    groups = [] if offs is None or (a.dim() == 2) != (b.dim() == 2) else [offs.shape[0]]
    if a.dim() == b.dim() == 3:
        groups = [a.shape[0]]
    shape = (*groups, a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    n_samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    n_states = 2 * max(target_lengths, default=0) + 1
    alpha = log_probs.new_empty((n_samples, log_probs.shape[0], n_states))
    return log_probs.new_empty(n_samples), alpha


def _loss(func: Any, position: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a loss in the memory of all its elements: the kernel computes them there first."""
    result: Tensor = func(*args, **kwargs)
    reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
    n_elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    if not reduction or n_elements <= result.numel():
        return result
    return result.new_empty(n_elements).as_strided(result.shape, result.stride())


STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten._ctc_loss.default: _ctc_loss,
    # steps of an optimizer in one kernel, which writes in place
    **{
        getattr(step, overload): lambda *_, **__: None
        for step in (_aten._fused_sgd_, _aten._fused_adagrad_)
        for overload in step.overloads()
    },
    **{
        func: partial(_loss, func, position)
        for func, position in (
            (_aten.mse_loss.default, 2),
            (_aten.smooth_l1_loss.default, 2),
            (_aten.soft_margin_loss.default, 2),
            (_aten.binary_cross_entropy.default, 3),
        )
    },
    **RECURRENT,
}
"""Functions that return the results of operations of which torch knows no shape, or that of CUDA's
kernel, or not all memory."""


# --- operations between ranks: nothing is sent, and nobody is waited for


def is_exchange(func: Any) -> bool:
    """Return whether an operation is one between ranks."""
    return func.namespace in EXCHANGES


def shown_for(func: Any) -> Callable[..., Any]:
    """Return a function that returns the result of an operation on tensors without data."""
    if func.namespace == OF_GROUPS:
        has_tensors = len(schema_of(func).returns) > 1
        return lambda first, *_, **__: (first, done_work()) if has_tensors else done_work()
    # torch's own without data returns a copy
    if str(func) == "_c10d_functional.wait_tensor.default":
        return lambda tensor: tensor
    return STAND_INS.get(func) or func
