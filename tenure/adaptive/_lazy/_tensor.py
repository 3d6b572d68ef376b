"""Tensors that are recorded, and how a call of torch becomes an entry of the tape.

Invariant: what Python is told of a recorded tensor is what plain PyTorch would tell; what depends
on its data is computed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tenure._callers import capture_site
from tenure._errors import AdaptiveUsageError
from tenure._text import describe_elements
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.wrappers import make_wrapper, recorded_by_autograd
from tenure._torch.writes import version_of

from . import _evaluate as evaluate
from ._batch_int import BatchInt
from ._labels import SHARED
from ._rules import names
from ._shapes import HOOK, NORMALIZATIONS, Call, Meta, Out, Shape, meta_of, numbers_in, rebuilt
from ._tape import Entry, Leaf, Modes, Ref, Tape, flat_tensors, leaf_of, new_number

_MANY = 8192
_ELSEWHERE = 10007
_known: dict[Any, Shape] = {}
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                    torch.memory_format, type(...), bytes})  # fmt: skip


class LazyTensor(Tensor):
    """A tensor that was recorded and not computed; see `lazy`."""

    _tape: Tape
    _number: int
    _meta: Meta
    _is_data: bool = False

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
            answer = _PROPERTIES.get(func.__self__.__name__)  # type: ignore[attr-defined]
            if answer is not None:
                return answer(args[0])
        answer = _ANSWERS.get(func)
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
        return evaluate.value_of(self)

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


def new_lazy(tape: Tape, number: int, meta: Meta) -> LazyTensor:
    """A handle of a recorded value."""
    made: LazyTensor = make_wrapper(
        LazyTensor,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=meta.device,
        requires_grad=meta.requires_grad,
    )
    made._tape, made._number, made._meta = tape, number, meta
    tape.hold(number, made)
    return made


def new_leaf(tape: Tape, leaf: Leaf, meta: Meta) -> LazyTensor:
    """A handle of a tensor that is there."""
    number = new_number()
    tape.leaves[number] = leaf
    return new_lazy(tape, number, meta)


# --- recording


_WITH_RATES = frozenset(
    names(
        """
        add sub rsub mul div true_divide pow add_ sub_ mul_ div_ __add__ __radd__ __sub__
        __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __iadd__ __isub__
        __imul__ __itruediv__ dropout masked_fill masked_fill_ clamp clip fill_ where lerp
        gt lt ge le eq ne
        """
    )
)


class _Walk:
    """Takes arguments apart: what is stored of them, and what makes two calls alike."""

    __slots__ = (
        "cuts",
        "freezes",
        "has_graph",
        "has_rates",
        "has_sizes",
        "is_known",
        "key",
        "lazies",
        "plains",
        "tape",
    )

    def __init__(self, func: Any = None) -> None:
        self.has_rates = getattr(func, "__name__", "") in _WITH_RATES
        self.key: list[Any] = []
        self.lazies: list[LazyTensor] = []
        self.plains: list[Tensor] = []
        self.has_sizes = self.has_graph = False
        self.is_known = True
        self.freezes = False
        self.cuts: dict[int, Ref] = {}

    def take(self, value: Any) -> Any:
        kind, key = type(value), self.key
        if kind is LazyTensor:
            key.append(value._meta)
            self.lazies.append(value)
            return Ref(value._number)
        if isinstance(value, Tensor):
            cut = self.cuts.get(id(value))
            if cut is not None:
                return cut
            if all(value is not other for other in self.plains):
                self.plains.append(value)
            # autograd recorded what it was computed by, and runs that backward once
            self.has_graph |= value.requires_grad and not value.is_leaf
            key.append((kind is Tensor, value.shape, value.stride(), value.dtype, value.device,
                        value.requires_grad, value.is_leaf))  # fmt: skip
            return value
        if kind in _PLAIN:
            key.append((kind, value))
            return value
        if kind is float:
            # a factor or a rate, which may change with each call; elsewhere it may be a shape
            key.append(kind if self.has_rates else (kind, value))
            return value
        if kind is BatchInt:
            self.has_sizes = True
            key.append((kind, int(value), value.at(_ELSEWHERE)))
            return int(value) if self.freezes else value
        return self._take_container(value, kind)

    def _take_container(self, value: Any, kind: type) -> Any:
        key = self.key
        if kind is tuple or kind is torch.Size:
            key.append((kind, len(value)))
            return tuple([self.take(each) for each in value])
        if kind is list:
            key.append((kind, len(value)))
            return [self.take(each) for each in value]
        if kind is dict:
            key.append((kind, *value))
            return {name: self.take(each) for name, each in value.items()}
        if kind is slice:
            key.append(kind)
            return slice(*[self.take(each) for each in (value.start, value.stop, value.step)])
        if isinstance(value, tuple | list):
            key.append((kind, len(value)))
            return rebuilt(value, [self.take(each) for each in value])
        if isinstance(value, int | float | complex):
            key.append((kind, value))
            return value
        self.is_known = False
        return value


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a call; what it gives, as tensors to be computed later."""
    if func in _SQUEEZES and len(args) == 1 and not kwargs:
        args = (args[0], _squeezed_dims(args[0]))
    walk = _Walk(func)
    stored, named = walk.take(args), walk.take(kwargs)
    if not walk.lazies:
        raise AdaptiveUsageError(_hidden(func))
    tape = _home_of(walk.lazies)
    for each in walk.lazies:
        refuse_own_function(each)
    modes = Modes.now(tape.kind)
    shape = _shape_of(func, walk, stored, named, modes, tape)
    if shape is None:
        return _run_now(func, args, kwargs, tape)
    if shape.is_value:
        return shape.out
    is_data = _is_data(walk, shape)
    if is_data and shape.kind != "chunk" and not shape.changed:
        shape = shape.as_before(tape.n_samples)
    if shape.cuts or shape.frozen or walk.has_graph:
        walk = _again(walk, shape, tape)
        stored, named = walk.take(args), walk.take(kwargs)
    made = _entered(func, stored, named, walk, modes, shape, tape)
    return _marked(made, is_data)


def _marked(made: Any, is_data: bool) -> Any:
    each: Any
    for each in flat_tensors(made) if is_data else ():
        each._is_data = True
    return made


_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze, Tensor.squeeze_})


def _squeezed_dims(tensor: LazyTensor) -> tuple[int, ...]:
    """The dimensions of size 1, which another number of samples has too: a single one stays."""
    label = tensor._meta.label
    kept = label.dim if label.is_batch else -1
    return tuple([d for d, n in enumerate(tensor._meta.shape) if n == 1 and d != kept])


def _is_data(walk: _Walk, shape: Shape) -> bool:
    """Whether a call makes something of the batch alone."""
    return (
        all(each._is_data for each in walk.lazies)
        and not any(t.requires_grad or isinstance(t, nn.Parameter) for t in walk.plains)
        and not any(meta.requires_grad for meta in shape.metas)
    )


def _shape_of(
    func: Any, walk: _Walk, stored: Any, named: Any, modes: Modes, tape: Tape
) -> Shape | None:
    key = (func, modes, tape.n_samples, *walk.key)
    shape = _known.get(key) if walk.is_known else None
    if shape is not None:
        return shape
    metas = {each._number: each._meta for each in walk.lazies}
    call = Call(func, stored, named, metas, walk.plains, tape.n_samples, walk.has_sizes)
    try:
        shape = call.shape()
    except Exception:
        # its shape depends on data, it has no rule, or it is a mistake that torch will tell
        return None
    # a write into a tensor that was not recorded is seen by who reads it at once
    if shape.writes_plain and func not in NORMALIZATIONS:
        return None
    if walk.is_known:
        if len(_known) > _MANY:
            _known.clear()
        _known[key] = shape
    return shape


def _again(walk: _Walk, shape: Shape, tape: Tape) -> _Walk:
    other = _Walk()
    other.freezes = shape.frozen
    for tensor in walk.plains:
        if tensor.requires_grad and not tensor.is_leaf:
            other.cuts[id(tensor)] = Ref(tape.plain_leaf(tensor, None, 1))
    for i, (dim, inner) in shape.cuts.items():
        tensor = walk.plains[i]
        other.cuts[id(tensor)] = Ref(tape.plain_leaf(tensor, dim, inner))
    return other


def _entered(
    func: Any, stored: Any, named: Any, walk: _Walk, modes: Modes, shape: Shape, tape: Tape
) -> Any:
    # by the first of each: one that is given twice is one tensor
    given = list({each._number: each for each in walk.lazies}.values())
    numbers = [new_number() for _ in shape.metas]
    reads = (*(each._number for each in walk.lazies), *(r.number for r in walk.cuts.values()))
    outs = tuple(numbers_in(shape.out, numbers))
    plains = tuple([(tensor, version_of(tensor)) for tensor in walk.plains])
    entry = Entry(new_number(), func, stored, named, modes, outs, reads, shape, plains)
    if shape.kind != "chunk":
        entry.site = capture_site(sys._getframe(3), "site")
    tape.entries.append(entry)
    if shape.changed:
        tape.held = None
    for i, meta in shape.changed.items():
        given[i]._meta = meta
        if given[i]._number in tape.leaves:
            tape.written.add(given[i]._number)
    return _handles(shape.out, shape, numbers, given, walk.plains, tape)


def _handles(
    template: Any, shape: Shape, numbers: list[int], given: list[Any], plains: Any, tape: Tape
) -> Any:
    if isinstance(template, Out):
        if template >= 0:
            return new_lazy(tape, numbers[template], shape.metas[template])
        place = -1 - template
        return given[place] if place < len(given) else plains[place - len(given)]
    if isinstance(template, tuple | list):
        return rebuilt(
            template, [_handles(t, shape, numbers, given, plains, tape) for t in template]
        )
    if isinstance(template, dict):
        return {k: _handles(t, shape, numbers, given, plains, tape) for k, t in template.items()}
    return template


def _run_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tape: Tape) -> Any:
    """Run a call whose shape nobody knows on what it is given, and record that it ran."""
    walk = _Walk()
    stored, named = walk.take(args), walk.take(kwargs)
    # by the first of each: one that is given twice is one tensor
    given = list({each._number: each for each in walk.lazies}.values())
    values = {each._number: evaluate.value_of(each) for each in given}
    modes, template, entry = evaluate.run_now(func, stored, named, values, given, tape)
    if entry is None:
        return template
    entry.site, entry.modes = capture_site(sys._getframe(2), "site"), modes
    is_data = _is_data(walk, entry.shape) and not entry.shape.changed
    if is_data:
        entry.shape = entry.shape.as_before(tape.n_samples)
    tape.entries.append(entry)
    for i, meta in entry.shape.changed.items():
        given[i]._meta = meta
        if given[i]._number in tape.leaves:
            tape.written.add(given[i]._number)
    made = _handles(template, entry.shape, entry.made, given, walk.plains, tape)
    return _marked(made, is_data)


def _home_of(lazies: list[LazyTensor]) -> Tape:
    first = lazies[0]._tape.home()
    for each in lazies:
        home = each._tape.home()
        if home is not first:
            first.absorb(home)
        each._tape = first
    return first


def refuse_own_function(tensor: LazyTensor) -> None:
    """Make sure that no function of autograd has made a tensor, past the recording.

    Raises:
        AdaptiveUsageError: one has.
    """
    node = recorded_by_autograd(tensor)
    if node is None:
        return
    name = type(node).__name__
    raise AdaptiveUsageError(
        f"A tensor of lazy() came out of {name.removesuffix('Backward')!r}, a function with a "
        "backward pass of its own (torch.autograd.Function; hooks of modules that run backward and "
        "reentrant checkpoints are such, too): its calls can't be recorded, and its gradient would "
        "be lost. Use step() for this model, or checkpoint with use_reentrant=False."
    )


def _hidden(func: Any) -> str:
    return (
        f"{getattr(func, '__name__', func)}() got a tensor of lazy() inside of an object that is "
        "no list, tuple or dict. Pass it value()."
    )


# --- what is answered without recording


def _size(self: LazyTensor, dim: int | None = None) -> Any:
    return self._meta.size if dim is None else self._meta.size[dim]


def _numel(self: LazyTensor) -> int:
    total: int = 1
    for each in self._meta.size:
        total = total * each
    return total


def _stride(self: LazyTensor, dim: int | None = None) -> Any:
    return self._meta.stride if dim is None else self._meta.stride[dim]


def _grad(self: LazyTensor) -> Any:
    return evaluate.gradient_of(self)


def _on_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*[_computed(each) for each in args], **kwargs)

    return call


def _computed(value: Any) -> Any:
    return evaluate.value_of(value).detach() if type(value) is LazyTensor else value


def _register_hook(self: LazyTensor, hook: Callable[..., Any]) -> Any:
    handle = LaterHandle()
    _noted(self, _hook_later, (Ref(self._number), hook, handle))
    return handle


def _hook_later(tensor: Tensor, hook: Callable[..., Any], handle: LaterHandle) -> None:
    handle.begin(tensor.register_hook(hook))


def _noted(self: LazyTensor, func: Any, args: tuple[Any, ...]) -> None:
    """Record what gives no tensor and wants the whole gradient."""
    tape = self._tape.home()
    modes, site = Modes.now(tape.kind), capture_site(sys._getframe(2), "site")
    entry = Entry(new_number(), func, args, {}, modes, (), (self._number,), HOOK, site=site)
    tape.entries.append(entry)


class LaterHandle:
    """Removes a hook that is registered later."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._is_removed = False

    def begin(self, handle: Any) -> None:
        """It was registered."""
        self._handle = handle
        if self._is_removed:
            handle.remove()

    def remove(self) -> None:
        """Take the hook off, or don't register it."""
        self._is_removed = True
        if self._handle is not None:
            self._handle.remove()


def _retain_grad(self: LazyTensor) -> None:
    if not self._meta.is_leaf:
        _noted(self, Tensor.retain_grad, (Ref(self._number),))


def _contains(self: LazyTensor, element: Any) -> bool:
    if type(element) is LazyTensor:
        element = evaluate.value_of(element)
    return element in evaluate.value_of(self)


def _backward(self: LazyTensor, gradient: Any = None, retain_graph: Any = None,
              create_graph: bool = False, inputs: Any = None) -> None:  # fmt: skip
    refuse_own_function(self)
    evaluate.backward([self], [gradient], retain_graph, create_graph, inputs)


def _backward_of(tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
                 create_graph: bool = False, grad_variables: Any = None,
                 inputs: Any = None) -> None:  # fmt: skip
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    gradients = list(given) if given else [None] * len(roots)
    for root in roots:
        if type(root) is LazyTensor:
            refuse_own_function(root)
    evaluate.backward(roots, gradients, retain_graph, create_graph, inputs)


def _gradients_of(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As `torch.autograd.grad`, of the whole batch."""
    outs, ins = ([v] if isinstance(v, Tensor) else list(v) for v in (outputs, inputs))
    for each in (*outs, *ins):
        if type(each) is LazyTensor:
            refuse_own_function(each)
    evaluate.make_whole([each for each in (*outs, *ins) if type(each) is LazyTensor])
    real: Any = [[_whole(each) for each in values] for values in (outs, ins)]
    return torch.autograd.grad(*real, *args, **kwargs)


def _whole(value: Any) -> Any:
    return evaluate.value_of(value) if type(value) is LazyTensor else value


def _requires_grad_(self: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    tape = self._tape.home()
    leaf = tape.leaves.get(self._number)
    if leaf is None or any(self._number in entry.reads for entry in tape.entries):
        _noted(self, Tensor.requires_grad_, (Ref(self._number), requires_grad))
        meta = self._meta
        self._meta = meta.requiring(requires_grad)
        return self
    leaf.value.requires_grad_(requires_grad)
    self._meta = meta_of(leaf.value, self._meta.label)
    return self


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.stride: _stride,
    Tensor.dim: lambda self: len(self._meta.shape),
    Tensor.ndimension: lambda self: len(self._meta.shape),
    Tensor.__len__: lambda self: int(self._meta.shape[0]),
    Tensor.backward: _backward,
    torch.autograd.backward: _backward_of,
    torch.autograd.grad: _gradients_of,
    Tensor.requires_grad_: _requires_grad_,
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
    Tensor.is_floating_point: lambda self: self._meta.dtype.is_floating_point,
    Tensor.__contains__: _contains,
    torch.is_floating_point: lambda self: self._meta.dtype.is_floating_point,
}
for _name in names(
    """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__
    __dlpack__ __dlpack_device__ data_ptr untyped_storage storage storage_offset is_shared
    is_pinned equal allclose __hex__ __oct__
    """
):
    if hasattr(Tensor, _name):
        _ANSWERS[getattr(Tensor, _name)] = _on_value(getattr(Tensor, _name))

_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda self: self._meta.size,
    "dtype": lambda self: self._meta.dtype,
    "device": lambda self: self._meta.device,
    "requires_grad": lambda self: self._meta.requires_grad,
    "is_leaf": lambda self: self._meta.is_leaf,
    "ndim": lambda self: len(self._meta.shape),
    "layout": lambda self: torch.strided,
    "is_cuda": lambda self: self._meta.device.type == "cuda",
    "is_cpu": lambda self: self._meta.device.type == "cpu",
    "is_meta": lambda self: self._meta.device.type == "meta",
    "is_sparse": lambda self: False,
    "is_nested": lambda self: False,
    "is_quantized": lambda self: False,
    "grad": _grad,
    "_grad": _grad,
    "grad_fn": lambda self: _grad_fn(self),
    "_version": lambda self: 0,
    "_backward_hooks": lambda self: None,
    "names": lambda self: (None,) * len(self._meta.shape),
    "output_nr": lambda self: 0,
}


def _grad_fn(self: LazyTensor) -> Any:
    # hooks of modules look for their own function here
    refuse_own_function(self)
    return None if self._meta.is_leaf else Recorded(self)


class Recorded:
    """Stands for the node of autograd that a recorded tensor will have."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._what = repr(tensor)

    def name(self) -> str:
        """What it is the result of."""
        return "recorded"

    def __repr__(self) -> str:
        return f"<node of {self._what}>"


def lazy_leaf(tensor: Tensor, tape: Tape, label: Any = SHARED) -> LazyTensor:
    """A handle of a tensor of the user's."""
    made = new_leaf(tape, leaf_of(tensor, label), meta_of(tensor, label))
    made._is_data = not tensor.requires_grad
    return made
