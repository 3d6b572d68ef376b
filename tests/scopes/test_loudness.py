"""A disposed tensor refuses every use, and says in the error what it was and how to keep it.

Each operation stands once in a table: the name that its error must carry, and the use itself.
"""

import copy
import functools
import gc
import io
import operator
import pprint
import re
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import default_collate

from tenure import (
    DisposedTensorError,
    NewDisposeScope,
    ScopeUsageError,
    dispose,
    is_disposed,
    persist,
    statistics,
)

Use = Callable[[Tensor], object]


def disposed_tensor() -> Tensor:
    with NewDisposeScope("step"):
        tensor = torch.ones(2, 3, dtype=torch.float64)
    return tensor


def live() -> Tensor:
    return torch.ones(2, 3, dtype=torch.float64)


def linear_with(**tensors: Tensor) -> nn.Module:
    module = nn.Linear(3, 2).double()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def without_torch_function(use: Use) -> Use:
    def run(t):
        with torch._C.DisableTorchFunction():
            return use(t)

    return run


class PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


LOUD = [
    ("add()", lambda t: t + 1),
    ("add()", lambda t: torch.add(live(), t)),
    ("eq()", lambda t: t == live()),
    ("mul()", lambda t: np.float64(1) * t),
    ("sin.default()", torch.ops.aten.sin.default),
    # in place and out
    ("add_()", lambda t: operator.iadd(t, 1)),
    ("set_()", lambda t: live().set_(t)),
    ("add()", lambda t: torch.add(live(), 1, out=t)),
    ("_foreach_add_()", lambda t: torch._foreach_add_([live(), t], 1)),
    # shapes
    ("getitem()", lambda t: t[0]),
    ("getitem()", lambda t: live()[t]),
    ("setitem()", lambda t: operator.setitem(live(), 0, t)),
    # conversions and copies
    ("numpy()", lambda t: t.numpy()),
    ("array()", np.asarray),
    ("dlpack_device()", torch.from_dlpack),
    ("tolist()", lambda t: t.tolist()),
    ("bool()", bool),
    ("len()", len),
    ("index()", operator.index),
    ("detach()", lambda t: torch.tensor(t)),
    ("float()", lambda t: torch.tensor([t])),
    ("device()", torch.as_tensor),
    ("deepcopy()", copy.deepcopy),
    ("reduce_ex()", lambda t: torch.save({"held": t}, io.BytesIO())),
    # questions
    (".shape", lambda t: t.shape),
    ("data_ptr()", lambda t: t.data_ptr()),
    *(
        (f".{name}", operator.attrgetter(name))
        for name in ("dtype", "device", "grad", "data", "requires_grad")
    ),
    # autograd
    ("backward()", lambda t: t.backward()),
    (".data", lambda t: setattr(t, "data", live())),
    (".grad", lambda t: setattr(t, "grad", live())),
    ("device()", lambda t: setattr(live().requires_grad_(), "grad", t)),
    ("view_as()", PassThrough.apply),
    ("device()", torch.func.grad(torch.sum)),
    ("sym_size()", lambda t: torch.vmap(lambda x: t)(live())),
    # modules
    ("detach()", nn.Parameter),
    ("detach()", lambda t: linear_with(held=t).state_dict()),
    ("linear()", lambda t: torch.func.functional_call(nn.Linear(3, 2), {"weight": t}, live())),
    (".is_nested", lambda t: default_collate([t, t])),
    # past __torch_function__
    ("add()", without_torch_function(lambda t: torch.add(t, 1))),
    ("sym_size()", without_torch_function(lambda t: t.shape)),
    ("numel()", without_torch_function(lambda t: t.data_ptr())),
]


@pytest.mark.filterwarnings("ignore:To copy construct")  # torch.tensor(t) works, but is bad style
@pytest.mark.parametrize(("operation", "use"), LOUD)
def test_every_use_of_a_disposed_tensor_says_what_it_was(operation, use, nobody_searches):
    with pytest.raises(DisposedTensorError) as caught:
        use(disposed_tensor())
    assert re.fullmatch(
        re.escape(operation)
        + r" (got|of) float64\[2, 3\] on cpu, 48 B, disposed when <DisposeScope 'step'> "
        r"\(opened at \S*test_loudness\.py:\d+\) closed\. "
        r"(Keep it with move_to_outer\(\) or detach_from_scope\(\), make it inside persist\(\) if "
        r"it is a cache, or use it inside\."
        # some uses pass it on in a container that is no variable of torch's own
        r"|\S+ still holds it: store detach_from_scope\(\.\.\.\) there, or make it inside "
        r"persist\(\), if it is to outlive the block\.)",
        str(caught.value),
    )


@pytest.mark.parametrize("look", [repr, str, "{:.3f}".format, lambda t: pprint.pformat([t])[1:]])
def test_looking_at_a_disposed_tensor_is_quiet(look):
    assert look(disposed_tensor()).startswith("<DisposedTensor float64[2, 3] on cpu, 48 B, ")


def test_debuggers_and_containers_can_hold_a_disposed_tensor():
    tensor = disposed_tensor()
    assert dir(tensor) == ["__class__"]
    assert {tensor: 1}[tensor] == 1
    assert isinstance(tensor, Tensor)
    assert weakref.ref(tensor)() is tensor
    # what never looks at the tensor accepts it
    module = linear_with(held=tensor)
    assert module.held is tensor
    module.zero_grad()
    with pytest.raises(AttributeError, match=r"\.nothing of float64\[2, 3\]"):
        tensor.nothing  # noqa: B018  # reading it is the test
    assert not hasattr(tensor, "nothing")


# --- views and exports keep the data


@pytest.mark.parametrize("export", [np.asarray, torch.from_dlpack, lambda t: t.untyped_storage()])
def test_exports_stay_valid_when_their_tensor_is_disposed_and_memory_is_reused(export):
    with NewDisposeScope() as scope:
        tensor = torch.full((1 << 18,), 3.0)
        exported = export(tensor)
        if isinstance(exported, Tensor):
            scope.detach(exported)
    assert is_disposed(tensor)
    scribbles = [torch.full((1 << 18,), -1.0) for _ in range(8)]
    if isinstance(exported, torch.UntypedStorage):
        exported = torch.empty(0).set_(exported)
    assert (exported == 3.0).all()
    del scribbles


def test_what_dies_with_a_tensor_dies_when_it_is_disposed_or_with_the_handle():
    array = np.ones(4)
    tensor, died = torch.from_numpy(array), weakref.ref(array)
    fired: list[int] = []
    weakref.finalize(tensor, fired.append, 1)
    del array
    assert died() is not None
    dispose(tensor)
    assert died() is None
    assert fired == []
    del tensor
    gc.collect()
    assert fired == [1]


# --- soft, inner and refused disposal


def test_a_tensor_that_cpp_holds_weakly_is_disposed_softly():
    with NewDisposeScope("step"):
        retaining = live().requires_grad_() * 2
        retaining.retain_grad()
        referred = live()
        reference = torch._C._WeakTensorRef(referred)
        other = torch.ones(3)
    assert is_disposed(other)  # one tensor that refuses stops no other
    for tensor in (retaining, referred):
        assert is_disposed(tensor)
        with pytest.raises(DisposedTensorError, match=r"^add\(\) got float64\[2, 3\] on cpu, 48 B"):
            tensor + 1
    assert not reference.expired()


class Slotted(TwoTensor):
    """A wrapper subclass whose class can't be exchanged, as a DTensor's can't."""

    __slots__ = ("extra",)


def test_a_wrapper_with_slots_is_disposed_inside_and_is_so_when_all_tensors_in_it_are():
    inner, second = live(), live()
    wrapper = Slotted(inner, second)
    dispose(inner)
    assert not is_disposed(wrapper)
    with NewDisposeScope("step") as scope:
        scope.attach(second)
    assert is_disposed(wrapper)
    with NewDisposeScope("step") as scope:
        wrapper = scope.attach(Slotted(live(), live()))
    assert is_disposed(wrapper)
    with pytest.raises(DisposedTensorError, match=r"float64\[2, 3\] on cpu"):
        wrapper + 1


class Immovable(Tensor):
    """A class that can neither be exchanged nor has anything inside."""

    __slots__ = ("extra",)


def test_disposing_what_cannot_be_disposed_says_so_and_disposes_the_rest(caplog):
    immovable, other = live().as_subclass(Immovable), live()
    before = statistics().disposed_outside_scope
    with pytest.raises(
        ScopeUsageError,
        match=r"^dispose\(\) got a Immovable, whose class has __slots__ and no __tensor_flatten__ "
        r"that works.* It stays alive; all other tensors of the call were disposed\. Delete",
    ):
        dispose(immovable, other)
    assert repr(other).startswith("<DisposedTensor float64[2, 3] on cpu, 48 B, disposed by")
    assert statistics().disposed_outside_scope == before + 1
    with NewDisposeScope() as scope:
        scope.attach(immovable)
        other = torch.ones(1)
    assert not is_disposed(immovable)
    assert is_disposed(other)
    assert "A Immovable could not be disposed; it stays alive." in caplog.text


# --- disposal from inside a running operation waits for its end


def test_a_pack_hook_may_dispose_the_operand_and_the_result_is_right():
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    operand = (leaf * 1).requires_grad_()

    def pack(saved):
        dispose(operand)
        return saved.detach().clone()

    with NewDisposeScope() as scope:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            cubes = scope.detach(operand**3)
        assert not is_disposed(cubes)
    assert cubes.tolist() == [8, 27]
    with NewDisposeScope():
        pass
    assert is_disposed(operand)
    cubes.sum().backward()
    assert leaf.grad.tolist() == [12, 27]


def test_a_hook_of_the_function_that_opened_the_scope_may_dispose_what_the_pass_works_on():
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    seen: list[bool] = []

    def step(condemned: Tensor | None) -> Tensor | None:
        if condemned is not None:
            dispose(condemned)
            seen.append(is_disposed(condemned))
            return None
        with NewDisposeScope():
            middle = leaf * 2
            # the same code, in another frame, runs within the pass
            leaf.register_hook(lambda _: step(middle))
            (middle**2).sum().backward()
        return middle

    middle = step(None)
    assert seen == [False]
    assert leaf.grad.tolist() == [16, 24]
    assert is_disposed(middle)


def test_a_scope_in_a_backward_hook_owns_what_the_hook_makes_and_leaves_no_mode_behind():
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    inside: list[Tensor] = []
    depths: list[int] = []

    def hook(gradient):
        depths.append(torch._C._len_torch_function_stack())
        with NewDisposeScope() as scope:
            inside.append(gradient * 2)
            doubled = scope.move_to_outer(inside[0] + 0)
        depths.append(torch._C._len_torch_function_stack())
        return doubled

    with NewDisposeScope() as outer:
        depth = torch._C._len_torch_function_stack()
        product = leaf * 3
        product.register_hook(hook)
        product.sum().backward()
        assert torch._C._len_torch_function_stack() == depth
        later = torch.ones(1)
        assert later in outer
    assert depths == [0, 0]
    assert is_disposed(inside[0])
    assert leaf.grad.tolist() == [6, 6]
    assert torch._C._len_torch_function_stack() == 0


class SquareInScopes(torch.autograd.Function):
    """Opens a scope in both passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with NewDisposeScope() as scope:
            return scope.detach(x * x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        types.append(type(x))
        with NewDisposeScope() as scope:
            return scope.detach(2 * x * gradient)


types: list[type] = []


def test_scopes_work_inside_a_custom_function_which_gets_the_class_that_was_saved():
    parameter = nn.Parameter(torch.tensor([2.0, 3.0]))
    with NewDisposeScope() as scope:
        total = scope.move_to_outer(SquareInScopes.apply(parameter).sum())
        dispose(parameter)
    # of the handle that autograd hands out
    handle = total.grad_fn.next_functions[0][0].next_functions[0][0].variable
    total.backward()
    assert types == [nn.Parameter]
    assert handle.grad.tolist() == [4, 6]
    assert torch._C._len_torch_function_stack() == 0


class DoubleInAScope(torch.autograd.Function):
    """Forgets to hand on one of its results."""

    @staticmethod
    def forward(ctx, x):
        with NewDisposeScope("inside"):
            return x.clone(), x * 2

    @staticmethod
    def backward(ctx, first, second):
        return first


@pytest.mark.skipif(
    not hasattr(torch.autograd.Function.apply, "__code__"),
    reason="torch 2.15 calls forward() in C, and the process may end there",
)
def test_a_disposed_result_of_a_custom_function_is_refused_at_its_first_use():
    # torch reads its shape where an exception would end the process
    _, result = DoubleInAScope.apply(torch.ones(2, requires_grad=True))
    assert is_disposed(result)
    with pytest.raises(DisposedTensorError, match=r"^add\(\) got float32\[2\].*'inside'"):
        result + 1


# --- caches that a block fills by the way: loud afterwards, and whole when filled in persist()


class Rotary(nn.Module):
    """Keeps its table as a plain attribute, made at the first call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1]).cos()
        return x * self.table


def test_an_attribute_filled_in_a_block_is_refused_with_the_place_of_both():
    module, x = Rotary(), torch.ones(3)
    with NewDisposeScope("first batch", capture="site"):
        module(x)
    with pytest.raises(DisposedTensorError) as caught:
        module(x)
    message = str(caught.value)
    assert "disposed when <DisposeScope 'first batch'> (opened at " in message
    assert "it was created at tests/scopes/test_loudness.py:" in message
    assert message.endswith(
        "Rotary.table still holds it: store detach_from_scope(...) there, or make it inside "
        "persist(), if it is to outlive the block."
    )


def test_caches_of_functions_and_properties_are_named_and_whole_if_filled_in_persist():
    @functools.cache
    def mask(n: int) -> Tensor:
        return torch.ones(n, n).tril()

    distribution = Categorical(logits=torch.zeros(3))
    with NewDisposeScope():
        mask(2)
        distribution.probs  # noqa: B018  # reading it fills the cache
    with pytest.raises(
        DisposedTensorError, match=r"lru_cache of .*mask\[2\] still holds it: store"
    ):
        mask(2) + 1
    with pytest.raises(DisposedTensorError, match=r"distribution\.probs still holds it: store"):
        distribution.probs + 1
    mask.cache_clear()
    with NewDisposeScope():
        with persist():
            mask(2)
        assert (mask(2) + 1).sum().item() == 7
    assert not is_disposed(mask(2))


def test_the_holder_is_looked_for_once_and_its_failure_hides_nothing(monkeypatch):
    def search(tensors: list[Tensor]) -> list[list[object]]:
        searches.append(tensors)
        raise MemoryError

    searches: list[list[Tensor]] = []
    monkeypatch.setattr("tenure.scopes._disposed.find_holders", search)
    with NewDisposeScope():
        x = torch.ones(2)
    # asking whether there is an attribute searches nothing
    assert not hasattr(x, "no_such_name")
    assert searches == []
    for _ in range(2):
        with pytest.raises(DisposedTensorError, match="Keep it with"):
            x + 1
    assert len(searches) == 1


def test_what_is_loaded_in_a_block_is_the_blocks():
    buffer = io.BytesIO()
    torch.save({"b": [torch.zeros(1)]}, buffer)
    buffer.seek(0)
    with NewDisposeScope() as scope:
        loaded = torch.load(buffer)
        copied = scope.detach(copy.deepcopy(loaded))
    assert is_disposed(loaded["b"][0])
    assert copied["b"][0].tolist() == [0]
