"""Work that runs on tensors without data: real ones lend their handles to fakes for a while.

Invariant: after the block each handle has the tensor, the class and the attributes that it had; no
value was written, and no gradient. Whoever holds a handle (a module, an optimizer, a closure) sees
the fake in the meantime, so that nothing has to be found but the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from tenure._torch.autograd import carry_hooks_over
from tenure._torch.fakes import FakeTensor, fake_of, is_fake, mode_of, new_mode
from tenure._torch.quiet import set_class, without_functions
from tenure._torch.swap import swap


class _Lent(NamedTuple):
    """A handle that shows a fake.

    Attributes:
        handle: the user's.
        twin: the handle that has the real tensor in the meantime.
        cls: the class of the real tensor.
        attributes: its attributes.
    """

    handle: Any
    twin: Any
    cls: type[Tensor]
    attributes: dict[str, Any]


def mode_for(tensors: Iterable[Tensor]) -> Any:
    """The mode whose fakes are among ``tensors``; else a new one."""
    return next((mode_of(tensor) for tensor in tensors if is_fake(tensor)), None) or new_mode()


@contextmanager
def lent_to_fakes(tensors: Iterable[Tensor], mode: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """A block in which tensors have no data.

    Args:
        tensors: of any shape, dtype and device; those of ``meta`` appear on the CPU. Those of a
            subclass stay as they are: the mode makes fakes of them where they are used.
        mode: a mode of `tenure._torch.fakes`; it is not entered here.

    Yields:
        Pairs of a handle that shows a fake and one that has the real tensor in the meantime.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as back:
        with without_functions():
            for tensor in tensors:
                if is_fake(tensor):
                    back.callback(_put_gradient, tensor, tensor.grad if tensor.is_leaf else None)
                elif type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
                    lent = _lend(tensor, mode)
                    back.callback(_take_back, lent)
                    pairs.append((lent.handle, lent.twin))
        yield pairs


def _lend(handle: Any, mode: Any) -> _Lent:
    twin = fake_of(handle, mode)
    lent = _Lent(handle, twin, type(handle), handle.__dict__)
    seen = {**lent.attributes, **twin.__dict__}
    set_class(handle, FakeTensor)
    try:
        swap(handle, twin)
    # something in C++ holds a weak reference: the mode makes a fake where it is used
    except RuntimeError:
        set_class(handle, lent.cls)
        raise
    handle.__dict__ = seen
    set_class(twin, lent.cls)
    carry_hooks_over(handle)
    return lent


def _take_back(lent: _Lent) -> None:
    with without_functions():
        set_class(lent.twin, FakeTensor)
        swap(lent.handle, lent.twin)
        set_class(lent.handle, lent.cls)
        lent.handle.__dict__ = lent.attributes


def _put_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if tensor.is_leaf:
        tensor.grad = gradient
