"""Tensors that are recorded.

Invariant: a call of torch is answered where no data is needed, else recorded; what comes past the
recording is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_elements
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from ._answers import ANSWERS, PROPERTIES
from ._evaluate import value_of
from ._handle import Handle, refuse_own_function
from ._label import SHARED
from ._recording import record
from ._shapes import meta_of
from ._tape import Tape, leaf_of, new_number


class LazyTensor(Handle):
    """A tensor that was recorded and not computed; see `lazy`."""

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the call, or answer it where no data is needed."""
        if is_dynamo_compiling():
            raise AdaptiveUsageError(_COMPILED)
        if func.__name__ == "__get__":
            answer = PROPERTIES.get(func.__self__.__name__)  # type: ignore[attr-defined]
            if answer is not None:
                return answer(args[0])
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        return record(func, args, dict(kwargs) if kwargs else {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what came past the recording."""
        raise AdaptiveUsageError(
            f"{func} got a tensor of lazy() where its calls can't be recorded, as in compiled code "
            "or in C++ that calls torch. Pass it value(), or use step(), which runs functions "
            "whole."
        )

    def value(self) -> Tensor:
        """The tensor itself, computed if it was not."""
        refuse_own_function(self)
        return value_of(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """What it will be, or what it is, without computing anything."""
        what = f"{describe_elements(self._meta.dtype, self._meta.shape)} on {self._meta.device}"
        done = self._number in self._tape.home().values
        return f"lazy {what}{'' if done else ', not computed yet'}"

    def __str__(self) -> str:
        """As the tensor itself."""
        return str(self.value())

    def __format__(self, spec: str) -> str:
        """As the tensor itself."""
        return format(self.value(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the tensor itself."""
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """A tensor that was computed; what has a graph can't be copied, as with any tensor."""
        return self.value().__deepcopy__(memo)


_COMPILED = (
    "A function that torch.compile has compiled was called with a tensor of lazy(): what it "
    "computes can't be recorded. Call the function that is not compiled, or use step()."
)


def lazy_leaf(tensor: Tensor, tape: Tape, label: Any = SHARED) -> LazyTensor:
    """A handle of a tensor of the user's."""
    number = new_number()
    tape.leaves[number] = leaf_of(tensor, label)
    made = LazyTensor._of(tape, number, meta_of(tensor, label))
    made._is_data = not tensor.requires_grad
    return made
