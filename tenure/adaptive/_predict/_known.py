"""Values of small tensors in a prediction: lengths, masks, positions and counts, computed along.

What a program asks of its data, whether any token is padding or how many there are, is asked of
few whole numbers that were there before or that it made itself. Their values are kept beside the
tensors without data, so that what depends on them is as it will be.

Invariant: a storage is known whole or not at all; what writes unknown values into it ends that.
"""

from __future__ import annotations

from typing import Any
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage

from tenure._containers import passed_tensors
from tenure._storages import inner_tensors, sparse_parts
from tenure._torch.fakes import is_fake, no_fakes
from tenure._torch.modes import schema_of
from tenure._torch.sharding import is_dtensor
from tenure._torch.storages import key_of

from ._exchanges import is_exchange

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

    def value(self, fake: Tensor) -> Tensor | None:
        """Return the values of a tensor, if they are known; only read them."""
        if fake.layout is not torch.strided:
            return None
        storage = self._real.get(key_of(fake.untyped_storage()))
        if storage is None:
            return _constant(fake)
        with no_fakes():
            empty: Any = torch.empty(0, dtype=fake.dtype, device=_HOST)
            shown: Tensor = empty.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
        return shown

    def n_true(self, mask: Tensor) -> int | None:
        """Return how many elements of a mask are true, if that is known."""
        value = self.value(mask)
        if value is None:
            return None
        with no_fakes():
            return int(value.count_nonzero())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on known tensors; None if one is not known.

        None of an exchange, too: the other ranks would have to take part.
        """
        if is_exchange(func):
            return None
        real_args, real_kwargs = self._real_of(args), self._real_of(kwargs)
        if real_args is None or real_kwargs is None:
            return None
        with no_fakes(), torch.no_grad():
            result = func(*real_args, **real_kwargs)
        # what writes lists of tensors in place gives nothing
        return () if result is None else result

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Do an operation for the values as well, where all that it reads is known."""
        made = [each for each in passed_tensors(result) if is_fake(each)]
        written = _written(func, args, kwargs)
        # a scaler steps its optimizer where all gradients are finite: that takes more
        if func is _UNSCALE:
            written = [*args[0]]
        if not written and not any(map(_is_eligible, made)):
            return
        if func is _UNSCALE or torch.Tag.nondeterministic_seeded in func.tags:
            known = None
        else:
            try:
                known = self.run(func, args, kwargs)
            # a kernel that wants what no host has: the values are not known then
            except (RuntimeError, NotImplementedError):
                known = None
        if known is None and not written:
            known = self._decided_by_one(func, args, result)
        if known is None:
            for tensor in written:
                for storage in storages_of(tensor):
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
        for each in passed_tensors(args):
            n_true = self.n_true(each) if is_fake(each) else None
            if n_true == (each.numel() if decides else 0):
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

    def _real_of(self, values: Any) -> Any:
        """Return the arguments with values for tensors; None if one is not known."""
        if is_fake(values):
            return self.value(values)
        if isinstance(values, list | tuple):
            found = [self._real_of(each) for each in values]
            unknown = any(f is None and v is not None for f, v in zip(found, values, strict=True))
            return None if unknown else type(values)(found)
        if isinstance(values, dict):
            found = self._real_of(list(values.values()))
            return None if found is None else dict(zip(values, found, strict=True))
        return _HOST if isinstance(values, torch.device) else values


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages of a tensor of any layout, with data or without."""
    if is_dtensor(tensor):
        return [storage for part in inner_tensors(tensor) for storage in storages_of(part)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    return [part.untyped_storage() for _, part in sparse_parts(tensor)]


def _constant(fake: Any) -> Tensor | None:
    """Return the mode's own value of a number, as of ``torch.tensor(1.0)``; do not write it."""
    constant: Tensor | None = getattr(fake, "constant", None)
    if constant is None:
        return None
    with no_fakes():
        return constant.clone()


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
    written: list[Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += passed_tensors(value)
    return written
