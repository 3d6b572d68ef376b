"""The private names of torch that tenure stands on still do what it takes them for."""

import dataclasses
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler, profiler_legacy
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from tenure import NewDisposeScope, TenureWarning, is_disposed, statistics
from tenure._torch import (
    _stand_in,
    allocations,
    autograd,
    bound,
    compiler,
    cpu_allocator,
    device_allocator,
    fakes,
    gradient_sums,
    lending,
    modes,
    modules,
    optimizers,
    optional,
    pytree,
    quiet,
    replicas,
    require,
    sharding,
    storages,
    swap,
    trap,
    writes,
)
from tenure._torch.counting import OF_CPP, SOLE
from tenure.scopes import _self_test, _tracker


def same(packed: Any) -> Any:
    return packed


# --- what is asked at run time


def test_a_temporary_a_turn_a_mark_and_a_block_of_an_earlier_turn_come_out_right():
    allocations.begin()
    kept = torch.empty(64, dtype=torch.uint8, device="cpu")
    torch.UntypedStorage(32, device="cpu")
    first = allocations.turn()
    allocations.marker()(1)
    del kept
    second = allocations.end()
    assert first == ([64, 32, -32], [])
    assert second == ([allocations.as_event(1), -64], [])
    assert not allocations.is_profiling()


def test_a_block_from_before_is_seen_to_end_once_it_is_entered():
    old = torch.empty(96, dtype=torch.uint8, device="cpu")
    cpu_allocator.keep_sizes()
    try:
        cpu_allocator.enter(old.untyped_storage())
        before = cpu_allocator.live_bytes()
        del old
        assert cpu_allocator.is_known()
        assert cpu_allocator.live_bytes() == before - 96
        assert cpu_allocator.is_lazily_copied(optional("torch._lazy_clone")(torch.ones(1)))
    finally:
        cpu_allocator.keep_sizes_as_before()


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build with CUDA")
def test_a_build_with_cuda_has_the_names_of_workspaces():
    assert optional(device_allocator._CLEAR) is not None
    if torch.__version__ >= device_allocator._HAS_SIZES:
        require(device_allocator._cublas_bytes, device_allocator._cublaslt_bytes)


def test_the_settings_of_the_allocator_are_a_text():
    assert isinstance((optional(device_allocator._SETTINGS) or str)(), str)


def test_a_profiler_of_the_program_announces_itself_and_leaves_torch_as_it_was():
    functions = vars(profiler.profile)
    uses = [functions[name].__code__.co_names for name in ("_prepare_trace", "_start_trace")]
    assert "_prepare_profiler" in uses[0]
    assert "_enable_profiler" in uses[1]
    begin, calls = profiler_legacy._enable_profiler_legacy, []
    stop = allocations.announce(lambda: calls.append(1))
    with profiler_legacy.profile():
        pass
    stop()
    assert calls
    assert profiler_legacy._enable_profiler_legacy is begin


@pytest.mark.skipif(not trap.works(), reason="needs torch 2.12 or newer, built with CUDA")
def test_a_trap_can_be_set_and_taken_out():
    probe = torch.zeros(1)
    trap.arm(probe.untyped_storage(), "trapped")
    with pytest.raises(RuntimeError, match="trapped"):
        probe.item()
    trap.disarm(probe.untyped_storage())
    assert probe.item() == 0


# --- autograd


def test_a_hook_has_the_engine_below_it_and_what_was_saved_is_known():
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(
        lambda _: seen.append((autograd.is_in_engine(sys._getframe()), autograd.is_running_node()))
    )
    product = leaf * leaf
    saved = product.grad_fn._raw_saved_self
    assert autograd.is_saved_tensor(saved)
    assert autograd.content_of_saved(saved) == (leaf, None)
    product.backward()
    assert seen == [(True, True)]
    assert autograd.hooks_of(leaf)
    assert not autograd.post_hooks_of(leaf)
    with pytest.raises(RuntimeError, match=autograd.BACKWARD_TWICE):
        product.backward()
    assert not autograd.is_running_node()


def test_the_end_of_a_pass_is_told_and_a_pass_that_fails_lets_go_of_who_is_told():
    told = []

    class Ending:
        def __call__(self):
            told.append("end")

        def __del__(self):
            told.append("gone")

    def fail(_):
        autograd.at_end_of_backward(Ending())
        raise ZeroDivisionError

    def end(_):
        autograd.at_end_of_backward(lambda: told.append("end"))

    for hook in (end, fail):
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(hook)
        with suppress(ZeroDivisionError):
            leaf.sum().backward()
    assert told == ["end", "gone"]


def test_hooks_of_saved_tensors_and_batches_of_gradients_are_known():
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert autograd.hooks_of_saved() == (same, same)
    assert autograd.hooks_of_saved() is None
    batches = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda g: batches.append(autograd.is_batch_of_gradients(g)))
    seeds = torch.eye(2)
    torch.autograd.grad(leaf * 2, leaf, seeds, is_grads_batched=True)
    torch.autograd.grad(leaf * 2, leaf, seeds[0])
    assert batches == [True, False]
    assert not autograd.is_transformed()


def test_the_sum_of_two_gradients_is_seen_and_nodes_have_the_numbers_that_were_foretold():
    before = gradient_sums.next_sequence()
    node = (torch.ones(2, requires_grad=True) * 2).grad_fn
    assert autograd.node_number(node) == before
    assert gradient_sums.current_node() is None
    assert gradient_sums._uses_alone() > 0


# --- torch.compile


def test_marked_functions_run_as_they_are_and_in_a_block_that_does_not_compile_all_do():
    seen = []

    @compiler.never_compiled
    def marked(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    def unmarked(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    @compiler.breaks_graphs
    def breaking(x):
        return marked(x)

    compiled = torch.compile(marked, backend="eager")
    compiled(torch.ones(1))
    torch.compile(lambda x: breaking(x * 2) * 2, backend="eager")(torch.ones(1))
    with compiler.not_compiling():
        torch.compile(unmarked, backend="eager")(torch.ones(1))
    assert seen == [False, False, False]
    assert compiler.is_compiled(compiled)
    assert not compiler.is_compiled(marked)


def test_torch_tells_whether_a_graph_hands_out_a_tensor():
    assert optional("torch._C._is_cached_tensor")(torch.empty(0)) is False


# --- tensors without data, storages, versions


def test_a_huge_fake_takes_nothing_and_that_of_a_tensor_remembers_its_device():
    mode = fakes.new_mode()
    with mode:
        huge = torch.empty(2**50, dtype=torch.uint8, device="cpu")
        assert fakes.is_fake(huge + 1)
        assert mode.from_tensor(torch.ones(2)).device.type == "cpu"


def test_a_storage_that_a_tensor_lies_in_is_used_once_more_than_a_fresh_one():
    storage = torch.UntypedStorage(1)
    probe = storages.UseProbe(storages.SET, lambda args: storages.n_uses(args[1]))
    holder = storages._put_in_a_tensor(storage)
    with probe:
        storages._put_in_a_tensor(storage)
    assert probe.n_uses == storages.uses_by_torch(False) + 1
    assert holder.untyped_storage() is storage


def test_a_view_and_a_graph_are_seen_to_hold_a_tensor_and_their_end_too():
    holder = {0: torch.ones(2, 2)}
    assert not storages.is_held(holder, 0)
    view = holder[0].t()
    assert storages.is_held(holder, 0)
    del view
    product = torch.ones(2, 2, requires_grad=True) * holder[0]
    assert storages.is_held(holder, 0)
    del product
    assert not storages.is_held(holder, 0)


def test_a_storage_counts_its_tensors_and_a_shared_one_is_known_by_the_same_number():
    t = torch.ones(1)
    storage, view = t.untyped_storage(), t.view(1)
    assert storages.owners_of_storage(storage) == len((t, view))
    assert StorageWeakRef(storage).cdata == storages.key_of(storage)
    assert hasattr(shared_cache, "values")


def test_what_shows_lent_bytes_is_seen_and_its_end_too():
    lent = lending.Lent(torch.arange(8, dtype=torch.uint8), 2, 4)
    tensor = torch.empty(0, dtype=torch.uint8).set_(lent.storage)
    assert tensor.tolist() == [2, 3, 4, 5]
    assert (lent.is_shared(0), lent.is_shared(1)) == (True, False)
    for show in (Tensor.detach, Tensor.untyped_storage):
        shown = show(tensor)
        assert lent.is_shared(1)
        del shown
        assert not lent.is_shared(1)


def test_tensors_are_as_before_when_nobody_notes_what_is_asked_of_them():
    names = ("data", "numpy", "__dlpack__", "record_stream")
    before = [vars(Tensor).get(name) for name in names]
    value = torch.ones(2)
    end = lending.note_while(value)
    asked = [value.data.tolist(), value.numpy().tolist(), Tensor.data.__get__(value).tolist()]
    end()
    assert asked == [[1.0, 1.0]] * 3
    assert before == [vars(Tensor).get(name) for name in names]


def test_writes_are_counted_by_what_does_not_keep_the_memory_that_is_written():
    tensor = torch.zeros(2)
    counting_ = writes.writes_of(tensor)
    before = writes.counter_of(counting_)
    tensor.view(1, 2).add_(1)
    assert writes.counter_of(counting_) == before + 1
    assert counting_.numel() == 0
    apart = tensor.data
    writes.set_version(apart, writes.counter_of(counting_))
    assert writes.counts_with(tensor, counting_)
    assert not writes.counts_with(tensor, apart)


def test_a_backward_pass_accepts_a_saved_tensor_that_was_changed_and_written_back():
    weight = torch.ones(2, requires_grad=True)
    buffer = torch.tensor([2.0, 3.0])
    before, version = buffer.clone(), writes.version_of(buffer)
    result = (weight * buffer).sum()
    buffer.zero_()
    writes.write_back(buffer, before, version)
    result.backward()
    assert weight.grad.tolist() == [2.0, 3.0]


def test_what_is_written_moves_away_from_its_lazy_copy_and_only_then():
    tensor = torch.zeros(2)
    copy = writes.lazy_copy(tensor)
    assert writes.share_memory(tensor, copy)
    tensor.add_(1)
    assert not writes.share_memory(tensor, copy)
    assert (copy.tolist(), tensor.tolist()) == ([0, 0], [1, 1])


def test_a_wrapper_has_the_shape_that_was_asked_for_and_a_function_of_autograd_is_told():
    class Wrapper(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return new()

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    def new():
        return swap.make_wrapper(
            Wrapper, (2, 3), dtype=torch.float32, device="cpu", requires_grad=False
        )

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

    with quiet.without_subclass_functions():
        assert quiet.TENSOR_BASE.shape.__get__(new()) == (2, 3)
    source = new()
    swap.require_grad(source, True)
    made = Own.apply(source)
    assert swap.recorded_by_autograd(new()) is None
    assert swap.recorded_by_autograd(made) is not None


# --- modes


class Seeing(modes.DispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Refusing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, *_):
        raise AssertionError("a quiet block ran a mode")


def test_modes_of_both_kinds_and_transforms_see_nothing_of_quiet_blocks():
    seen = []
    is_wrapped = bound("torch._C._functorch.is_functorch_wrapped_tensor", "this test")

    def transformed(x):
        for block in (quiet.aside, quiet.aside_with_subclasses):
            with Seeing(seen), block():
                made = torch.ones(1, device="cpu") + 1
            assert not is_wrapped(made)
        return x * 2

    torch.func.vmap(transformed)(torch.ones(2))
    t = torch.ones(1)
    with Refusing(), Seeing(seen), quiet.quietly():
        t + 1
    assert seen == []


def test_function_modes_are_pushed_found_and_removed():
    lower, upper = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    modes.push(lower)
    modes.push(upper)
    modes.remove(lower)
    assert modes.is_active(upper)
    assert not modes.is_active(lower)
    modes.push_lowest(lower)
    assert torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1) is upper
    assert modes.remove(upper)
    assert modes.remove(lower)
    assert not modes.is_active(upper)


def test_removing_a_mode_that_is_not_there_changes_nothing():
    mode, other = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    with other:
        modes.remove(mode)
        assert modes.is_active(other)
    assert torch._C._len_torch_function_stack() == 0


def test_a_dispatch_mode_is_taken_off_below_another():
    mode, inner = modes.DispatchMode(), modes.DispatchMode()
    mode.__enter__()
    with inner:
        assert modes.open_modes()[-2:] == [mode, inner]
        assert modes.remove_dispatch(mode)
        assert modes.open_modes()[-1] is inner
    assert mode not in modes.open_modes()
    assert modes.schema_of(torch.ops.aten.add.Tensor) is not None


# --- modules, optimizers, scalers


def test_modules_are_told_and_saved_where_we_look():
    ran, seen = [], []
    module = nn.Identity()
    with modules.modules_told(lambda each, _: ran.append(each)):
        module(None)
    assert ran == [module]

    class Saved(dict):
        def items(self):
            seen.append(modules.is_saving(sys._getframe(1)))
            return super().items()

    module._parameters = Saved()
    module.state_dict()
    assert seen == [True]


def test_optimizers_ask_these_lists():
    assert torch.Tensor in optimizers._types
    assert "cuda" in optimizers._devices()


def test_optimizers_run_their_hooks_in_the_order_of_the_dictionary():
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    told = []
    optimizer.register_step_post_hook(lambda *_: told.append("hook"))
    optimizers.unhooked_step(optimizer)
    assert told == []
    assert parameter.item() == 0
    with optimizers.before_post_hooks(optimizer, lambda: told.append("function")):
        optimizer.step()
    assert told == ["function", "hook"]
    assert len(optimizers._post_hooks(optimizer)) == 1


def test_scalers_ask_for_copies_here(monkeypatch):
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    replicator, asked = optional(optimizers._REPLICATOR), []
    get = replicator.get

    def asking(self, device):
        asked.append(device)
        return get(self, device)

    scaler.scale(parameter.sum()).backward()
    monkeypatch.setattr(replicator, "get", asking)
    scaler.step(optimizer)
    # the scale and whether it was exceeded
    assert len(asked) == 2
    assert parameter.tolist() == [0.0, 0.0]


# --- containers, groups of processes, the simulated accelerator


@dataclasses.dataclass
class Pair:
    left: int
    right: int


def test_a_registered_container_is_taken_apart_and_put_together():
    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([pair.left, pair.right], None), lambda items, _: Pair(*items)
    )
    try:
        children, make = pytree.parts_of(Pair(1, 2))
        assert children == [1, 2]
        assert make([3, 4]) == Pair(3, 4)
    finally:
        torch.utils._pytree.SUPPORTED_NODES.pop(Pair)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_ask_first_and_reducers_can_be_reset(monkeypatch):
    class Asked(Exception):
        pass

    def ask(group):
        raise Asked

    monkeypatch.setattr(optional(replicas._C10D), replicas._ASKS, ask)
    with pytest.raises(Asked):
        torch.distributed.all_reduce(torch.ones(1))
    assert hasattr(torch.distributed.ProcessGroup, "_device_types")
    for name in ("_reset_state", "_rebuild_buckets"):
        assert hasattr(torch.distributed.Reducer, name)


@pytest.mark.slow  # importing them takes seconds
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_sharded_modules_and_tensors_have_what_is_asked_of_them():
    for package in ("fsdp", "tensor"):
        import_module(f"torch.distributed.{package}")
    assert hasattr(torch.distributed.fsdp.FSDPModule, "_get_fsdp_state")
    assert hasattr(optional(sharding._PROPAGATOR), sharding._PROPAGATES)
    assert hasattr(sharding.done_work(), "_type")


def test_the_simulated_accelerator_finds_all_that_it_needs():
    from tenure._torch import python_backend

    require(*python_backend._names)


# --- at import: a torch or a Python with which scopes would dispose gradients is refused


def test_the_self_test_of_scopes_passes_in_any_mode_and_counts_nothing():
    before = str(statistics())
    with torch.inference_mode(), torch.device("meta"), torch.no_grad():
        _self_test.check()
    assert str(statistics()) == before


def test_a_gradient_that_is_taken_for_a_new_tensor_is_noticed(monkeypatch):
    # as it was on Python 3.14: of a gradient that is read, one reference went uncounted
    monkeypatch.setattr(_tracker, "SOLE", SOLE + OF_CPP)
    with pytest.raises(ImportError, match=r"on Python 3.*: a scope disposes gradients that were"):
        _self_test.check()


def test_without_the_name_that_frees_a_tensor_it_passes_and_scopes_leave_tensors_alone(monkeypatch):
    """A handle that is disposed without a twin would be what `.grad` gives."""
    name = "torch._C._swap_tensor_impl"
    monkeypatch.setattr(swap, "_swap", _stand_in(name, "freeing memory"))
    with pytest.warns(TenureWarning, match=name):
        _self_test.check()
    with pytest.warns(TenureWarning, match=name), NewDisposeScope():
        made = torch.ones(3)
    assert not is_disposed(made)
    assert made.sum() == 3
