"""memory_budget on the CPU: what counts, what is refused, and what is left after a refusal."""

import copy
import functools
import gc
import io
import itertools
import os
import pickle
import threading
import weakref
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tenure import NewDisposeScope, TenureError, scoped
from tenure.adaptive import AdaptiveUsageError, memory_budget

OOM = torch.OutOfMemoryError


def ones(n_bytes):
    return torch.ones(n_bytes, dtype=torch.uint8)


def columns_loss(weight, device="cpu"):
    """Select from one tensor in a loop: autograd adds eight gradients to one."""
    h = torch.ones(64, 16, device=device) @ weight
    return torch.stack([(h[:, i % 2] * (i + 1)).sum() for i in range(8)]).sum()


def net_allocated_bytes(function):
    """What `function` leaves allocated, by the allocator's own events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return sum(event.nbytes() for event in memory_events(profile))


def memory_events(profile):
    events = profile.profiler.kineto_results.events()
    return [event for event in events if event.name() == "[memory]"]


# --- the limit


def test_what_fits_exactly_is_allowed_and_one_byte_more_is_not():
    with memory_budget(1024) as budget:
        kept = ones(1024)
        with pytest.raises(OOM, match="Tried to allocate 1 B"):
            ones(1)
        assert budget.live_bytes == budget.peak_bytes == 1024
        del kept
        assert budget.live_bytes == 0
        ones(1024)


def test_the_error_gives_every_size_exactly():
    with memory_budget("4KiB") as budget:
        kept = ones(3000)
        with pytest.raises(OOM) as caught:
            ones(2000)
    assert str(caught.value) == (
        "cpu out of memory. Tried to allocate 2.0 KiB (2000 bytes) in aten.ones.default. "
        "memory_budget has a limit of 4.0 KiB (4096 bytes) on cpu of which 1.1 KiB (1096 bytes) is "
        "free; 2.9 KiB (3000 bytes) is in use by what was made in its block. Make less at a time, "
        "free tensors, or raise the limit."
    )
    assert budget.live_bytes == kept.nbytes


def test_the_results_of_a_refused_operation_are_gone_while_its_error_is_still_held():
    before = ones(100)

    def refused():
        with memory_budget(150) as budget:
            with pytest.raises(OOM) as caught:
                before.repeat(2)
            assert budget.live_bytes == 0
        return caught

    errors = []
    assert net_allocated_bytes(lambda: errors.append(refused())) == 0
    assert len(errors) == 1


def test_a_refused_operation_does_not_count_as_a_peak():
    with memory_budget(100) as budget:
        with pytest.raises(OOM):
            ones(101)
        assert (budget.live_bytes, budget.peak_bytes) == (0, 0)


def test_several_results_are_refused_together():
    values = torch.randn(100)
    with memory_budget(900) as budget:
        with pytest.raises(OOM, match=r"Tried to allocate 1\.2 KiB \(1200 bytes\) in aten\.sort"):
            values.sort()
        assert budget.live_bytes == 0


def test_an_error_of_the_operation_itself_passes():
    with memory_budget(100) as budget:
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(2) + torch.ones(3)
        assert budget.live_bytes == 0


# --- what counts


def test_what_was_there_before_does_not_count_and_gives_no_credit():
    before = ones(1000)
    with memory_budget(100) as budget:
        view = before[10:].view(-1)
        before.add_(1)
        assert budget.live_bytes == 0
        del before, view
        assert budget.live_bytes == 0
        with pytest.raises(OOM):
            ones(101)


def test_a_storage_counts_once_and_as_long_as_any_view_lives():
    with memory_budget(1000) as budget:
        whole = ones(100)
        view = whole[:10].view(2, 5)
        del whole
        assert budget.live_bytes == 100
        del view
        assert budget.live_bytes == 0


MADE = {
    "torch.tensor": (lambda _: torch.tensor([1.0, 2.0]), 8),
    "torch.Tensor": (lambda _: torch.Tensor([1.0, 2.0]), 8),
    "new_tensor": (lambda x: x.new_tensor([1.0]), 4),
    "empty": (lambda _: torch.empty(5), 20),
    "deepcopy": (copy.deepcopy, 400),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), 400),
    "clone": (lambda x: x.clone(), 400),
    "a view": (lambda x: x[1:], 0),
    "in place": (lambda x: x.add_(1), 0),
    "detach": (lambda x: x.detach(), 0),
    "Parameter": (nn.Parameter, 0),
    "from_numpy": (lambda _: torch.from_numpy(np.ones(8)), 0),
    "as_tensor of numpy": (lambda _: torch.as_tensor(np.ones(8)), 0),
    "set_ to an old storage": (lambda x: torch.empty(0).set_(x.untyped_storage()), 0),
    "grown": (lambda x: x.resize_(150), 200),
    "out=": (lambda x: torch.add(x, 1, out=torch.empty(0)), 400),
    "sparse": (lambda _: torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
    # the columns of CSR are one row of COO indices
    "sparse_csr": (lambda _: torch.eye(3).to_sparse_csr(), 4 * 8 + 2 * 3 * 8 + 3 * 4),
    "share_memory_": (lambda x: x.clone().share_memory_(), 400),
    "meta": (lambda _: torch.empty(100, device="meta"), 0),
    "vmap": (lambda x: vmap(lambda row: row * 2)(x.view(10, 10)), 400),
    "grad": (lambda x: grad(lambda y: (y * y).sum())(x), 400),
    "inference mode": (torch.inference_mode()(lambda x: F.dropout(x.view(-1), training=False)), 0),
    "a module": (lambda _: nn.Linear(3, 2), 4 * (3 * 2 + 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(("make", "n_bytes"), MADE.values(), ids=MADE)
def test_everything_made_inside_counts_with_its_bytes(make, n_bytes):
    before = torch.ones(100)
    with memory_budget("1MiB") as budget:
        made = make(before)
        assert budget.live_bytes == n_bytes
        del made
        before = None
        assert budget.live_bytes == 0


def test_a_checkpoint_that_is_loaded_inside_counts_once():
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(100), "bias": torch.ones(10)}, buffer)
    buffer.seek(0)
    with memory_budget(1000) as outer, memory_budget(500) as inner:
        state = torch.load(buffer)
        assert outer.live_bytes == inner.live_bytes == 440
        del state
        assert outer.live_bytes == inner.live_bytes == 0


def test_a_wrapper_subclass_counts_with_what_it_wraps():
    parts = [torch.ones(2), torch.ones(3)]
    with memory_budget("1KiB") as budget:
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        resting_bytes = budget.live_bytes
        doubled = nested * 2
        assert budget.live_bytes == resting_bytes + 20
        del doubled, nested
        gc.collect()
        assert budget.live_bytes == 0


@pytest.mark.parametrize("n_workers", [0, 2])
def test_batches_of_a_loader_count_here_and_not_in_its_workers(n_workers):
    # a worker that is not forked, as by default from Python 3.14 on, gets a copy of the data set
    context = "fork" if n_workers and hasattr(os, "fork") else None
    data = TensorDataset(torch.ones(8, 25))
    loader = DataLoader(data, batch_size=4, num_workers=n_workers, multiprocessing_context=context)
    with memory_budget(900) as budget:
        sizes = []
        for (batch,) in loader:
            assert batch.shape == (4, 25)
            sizes.append(budget.live_bytes)
            del batch
    assert all(400 <= size <= 900 for size in sizes)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_no_limit():
    with memory_budget(10):
        child = os.fork()
        if child == 0:
            os._exit(0 if ones(100).sum() == 100 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_memory_that_is_freed_without_an_operation_counts_no_more():
    with memory_budget(100) as budget:
        kept = ones(80)
        kept.untyped_storage().resize_(0)
        assert budget.live_bytes == 0
        assert ones(100).shape == (100,)


# --- growth in place


def test_a_refused_resize_leaves_the_tensor_as_it_was():
    with memory_budget(100) as budget:
        kept = ones(12).view(3, 4).t()
        with pytest.raises(OOM, match=r"Tried to allocate 988 B .* in aten\.resize_"):
            kept.resize_(1000)
        assert (kept.shape, kept.stride(), kept.untyped_storage().nbytes()) == ((4, 3), (1, 4), 12)
        assert budget.live_bytes == 12
        assert kept.sum() == 12


def test_a_refused_resize_leaves_a_tensor_from_before_as_it_was():
    kept = ones(12)
    with memory_budget(100) as budget:
        with pytest.raises(OOM):
            kept.resize_(1000)
        assert (kept.shape, kept.untyped_storage().nbytes(), budget.live_bytes) == ((12,), 12, 0)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_a_refused_out_argument_keeps_its_shape_and_gives_back_what_it_grew():
    first, out = ones(60), ones(4)
    with memory_budget(100) as budget:
        with pytest.raises(OOM, match=r"in aten\.cat\.out"):
            torch.cat([first, first], out=out)
        assert (out.shape, out.untyped_storage().nbytes(), budget.live_bytes) == ((4,), 4, 0)


# --- training


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    return model, torch.randn(8, 16)


def step(model, batch, optimizer):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_step_leaves_what_the_allocator_says_it_leaves(kind):
    for _ in range(2):  # the profiler reports only the end of what it saw begin
        net_allocated_bytes(lambda: None)
    live = []

    def run():
        with memory_budget("1GiB") as budget:
            model, batch = model_and_batch()
            optimizer = kind(model.parameters())
            for _ in range(2):
                step(model, batch, optimizer)
            live.append(budget.live_bytes)
            live.append([model, batch, optimizer])

    assert net_allocated_bytes(run) == live[0]


def test_backward_is_refused_and_leaves_only_finished_gradients():
    model, batch = model_and_batch()
    needed = sum(p.nbytes for p in model.parameters())
    with memory_budget("1MiB") as budget:
        model(batch).square().mean().backward()
        peak_bytes = budget.peak_bytes
    model.zero_grad()
    with memory_budget(peak_bytes - 1) as budget:
        with pytest.raises(OOM, match="cpu out of memory"):
            model(batch).square().mean().backward()
        gc.collect()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert budget.live_bytes == sum(g.nbytes for g in gradients) < needed
    model.zero_grad()
    with memory_budget(peak_bytes):
        model(batch).square().mean().backward()


def test_an_optimizer_that_makes_its_state_is_refused():
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).square().mean().backward()
    with memory_budget(1000), pytest.raises(OOM):
        optimizer.step()


def test_no_grad_and_inference_mode_are_limited_too():
    weight = torch.ones(100, requires_grad=True)
    for context in (torch.no_grad, torch.inference_mode):
        with memory_budget(450) as budget, context():
            kept = weight * 2
            assert budget.live_bytes == 400
            with pytest.raises(OOM):
                weight.exp()
            del kept


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_lowers_the_peak_and_its_recomputation_is_limited(use_reentrant):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(4)]

    def peak(limit, run):
        x = torch.randn(256, 64, requires_grad=True)
        with memory_budget(limit) as budget:
            y = x
            for layer in layers:
                y = run(layer, y)
            y.sum().backward()
        return budget.peak_bytes

    def saving(layer, y):
        return checkpoint(layer, y, use_reentrant=use_reentrant)

    plain, saved = peak("1GiB", lambda layer, y: layer(y)), peak("1GiB", saving)
    assert saved < plain
    assert peak(saved, saving) == saved
    with pytest.raises(OOM):
        peak(saved - 1, saving)


def test_gradients_are_those_of_an_unlimited_step():
    model, batch = model_and_batch()
    model(batch).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with memory_budget("1GiB"):
        model(batch).square().mean().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


# --- nesting, modes and scopes


def test_the_inner_budget_and_the_outer_both_hold():
    with memory_budget(100) as outer:
        kept = ones(60)
        with memory_budget(30) as inner:
            with pytest.raises(OOM, match="limit of 30 B"):
                ones(31)
            assert (outer.live_bytes, inner.live_bytes) == (60, 0)
            with pytest.raises(OOM, match="limit of 100 B"):
                ones(45)
            assert (outer.live_bytes, inner.live_bytes) == (60, 0)
            also = ones(30)
            assert (outer.live_bytes, inner.live_bytes) == (90, 30)
        assert outer.live_bytes == kept.nbytes + also.nbytes


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_modes_see_the_same_operations_and_none_of_the_count():
    eye = torch.eye(3)

    def program():
        kept = (eye + 1).to_sparse()
        kept * 2

    with Names() as plain:
        program()
    with Names() as outside, memory_budget("1KiB"), Names() as inside, Passing():
        program()
    assert outside.seen == inside.seen == plain.seen


def test_budgets_inside_and_outside_of_scopes_count_what_the_scope_lets_go():
    with memory_budget(100) as outer, NewDisposeScope(), memory_budget(100) as inner:
        held = [ones(60)]
        with NewDisposeScope():
            held.append(ones(40))
            with pytest.raises(OOM):
                ones(1)
            assert outer.live_bytes == inner.live_bytes == 100
        assert outer.live_bytes == inner.live_bytes == 60
    assert len(held) == 2


def test_a_scope_owns_nothing_of_a_refused_operation():
    with memory_budget(10), NewDisposeScope() as scope:
        with pytest.raises(OOM):
            ones(11)
        assert len(scope) == 0


def test_a_scoped_function_can_be_limited():
    @memory_budget(100)
    @scoped
    def function(n):
        return ones(n) + 1

    assert function(50).shape == (50,)
    with pytest.raises(OOM):
        function(51)


# --- the block


def test_the_text_of_a_budget_carries_its_state():
    budget = memory_budget("1.5 KiB")
    assert repr(budget) == "<memory_budget 1.5 KiB on cpu, not yet open>"
    with budget:
        kept = ones(512)
        ones(512)
        assert repr(budget) == "<memory_budget 1.5 KiB on cpu, open, 512 B live, 1.0 KiB peak>"
    assert repr(budget) == "<memory_budget 1.5 KiB on cpu, closed, 512 B live, 1.0 KiB peak>"
    del kept
    assert budget.live_bytes == 512
    assert (budget.limit_bytes, budget.device) == (1536, torch.device("cpu"))


def test_after_the_block_nothing_is_limited_and_nothing_is_watched():
    with memory_budget(10) as budget:
        kept = ones(10)
    dead = weakref.ref(budget)
    assert ones(100).shape == (100,)
    assert torch._C._len_torch_dispatch_stack() == 0
    gc.disable()
    try:
        del budget
        assert dead() is None
    finally:
        gc.enable()
    del kept


def test_an_exception_of_the_block_passes_and_ends_the_limit():
    with pytest.raises(KeyError), memory_budget(10):
        raise KeyError
    assert ones(100).shape == (100,)


@pytest.mark.parametrize("when", ["while it is open", "after it"])
def test_a_second_entry_is_refused(when):
    budget = memory_budget(10)
    match = r"<memory_budget 10 B on cpu, .*> was entered a second time\. A budget is neither"
    with budget:
        if when == "while it is open":
            with pytest.raises(AdaptiveUsageError, match=match):
                budget.__enter__()
            with pytest.raises(OOM):
                ones(11)
    with pytest.raises(AdaptiveUsageError, match=match):
        budget.__enter__()
    assert ones(11).shape == (11,)


def test_an_exit_without_entry_is_refused():
    with pytest.raises(AdaptiveUsageError, match="not yet open> was closed, but it is not open"):
        memory_budget(10).__exit__(None, None, None)


def test_an_exit_out_of_order_is_an_error_and_loses_no_limit():
    outer, inner = memory_budget(100), memory_budget(50)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(AdaptiveUsageError, match=r"100 B on cpu, closed.* ended before a budget"):
        outer.__exit__(None, None, None)
    with pytest.raises(OOM, match="limit of 50 B"):
        ones(51)
    inner.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert ones(200).shape == (200,)


def test_an_exit_out_of_order_does_not_hide_the_error_of_the_block():
    outer, inner = memory_budget(100), memory_budget(50)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(KeyError, KeyError("mine"), None)
    inner.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_budget_that_ends_below_another_mode_says_so_and_is_gone_after_the_next():
    budget = memory_budget(10)
    budget.__enter__()
    with Names(), pytest.raises(AdaptiveUsageError, match="or another dispatch mode"):
        budget.__exit__(None, None, None)
    assert ones(100).shape == (100,)
    with memory_budget(10), pytest.raises(OOM):
        ones(11)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_budget_made_before_a_fork_holds_in_the_child_that_opens_it(monkeypatch):
    budget, parent = memory_budget(10), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with budget, pytest.raises(OOM):
        ones(11)


def test_budgets_end_in_order_from_a_stack():
    with ExitStack() as stack:
        budgets = [stack.enter_context(memory_budget(n)) for n in (100, 50, 75)]
        with pytest.raises(OOM, match="limit of 50 B"):
            ones(60)
    assert [budget.live_bytes for budget in budgets] == [0, 0, 0]


def test_another_thread_is_not_limited_and_cannot_end_the_limit():
    errors = []

    def work(budget):
        ones(100)
        try:
            budget.__exit__(None, None, None)
        except AdaptiveUsageError as error:
            errors.append(str(error))

    with memory_budget(10) as budget:
        thread = threading.Thread(target=work, args=(budget,), name="other")
        thread.start()
        thread.join()
        with pytest.raises(OOM):
            ones(11)
    assert len(errors) == 1
    assert "closed from thread 'other', and stays open" in errors[0]


def test_a_storage_that_dies_on_another_thread_counts_no_more():
    with memory_budget(100) as budget:
        held = [ones(100)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert budget.live_bytes == 0


def test_a_decorated_function_has_a_budget_for_each_call():
    @memory_budget(100)
    def nested(*sizes):
        made = ones(sizes[0])
        return [made, *nested(*sizes[1:])] if sizes[1:] else [made]

    kept = [nested(100), nested(50, 50)]
    assert len(kept) == 2
    with pytest.raises(OOM, match=r"Tried to allocate 51 B"):
        nested(50, 51)


def test_a_function_that_can_be_suspended_is_refused():
    def generator():
        yield

    with pytest.raises(AdaptiveUsageError, match=r"generator\(\), which can be suspended"):
        memory_budget(100)(generator)
    with pytest.raises(AdaptiveUsageError, match=r"generator\(\), which can be suspended"):
        memory_budget(100)(functools.partial(generator))


def test_what_is_no_function_is_refused_before_it_is_called():
    with pytest.raises(AdaptiveUsageError, match="wants a function, and got 3"):
        memory_budget(100)(3)


def test_a_budget_cannot_be_copied():
    with pytest.raises(AdaptiveUsageError, match="can't be copied or pickled"):
        copy.copy(memory_budget(10))


# --- torch.compile


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_functions_run_uncompiled_inside_and_are_counted(backend, compiled_before):
    function = torch.compile(lambda x: (x.sin() + x.cos()).exp(), backend=backend)
    x = torch.ones(100)
    if compiled_before:
        function(x)
    with memory_budget(1200) as budget:
        kept = function(x)
        assert (budget.live_bytes, budget.peak_bytes) == (kept.nbytes, 1200)
    with memory_budget(1199), pytest.raises(OOM, match=r"in aten\.(add|exp)"):
        function(x)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_budget_inside_a_compiled_function_holds():
    def limited(x):
        with memory_budget(500):
            return (x.sin() + x.cos()).exp()

    compiled = torch.compile(limited, backend="eager")
    with pytest.raises(OOM, match="limit of 500 B"):
        compiled(torch.ones(100))
    assert torch.equal(compiled(torch.ones(10)), limited(torch.ones(10)))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_higher_order_operator_runs_inside():
    x = torch.ones(10)
    with memory_budget("1KiB") as budget:
        picked = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        assert budget.live_bytes == picked.nbytes


# --- bad input

BAD_LIMITS = {
    "zero": (0, "got a limit of 0 bytes, in which nothing fits"),
    "negative": (-1, "-1 is not a number of bytes"),
    "nan": (float("nan"), "can't be read from a float"),
    "words": ("lots", "'lots' is not a number of bytes"),
    "bool": (True, "can't be read from a bool"),
    "None": (None, "can't be read from a NoneType"),
}


@pytest.mark.parametrize(("limit", "match"), BAD_LIMITS.values(), ids=BAD_LIMITS)
def test_a_limit_that_is_none_is_refused(limit, match):
    with pytest.raises(TenureError, match=match):
        memory_budget(limit)


BAD_DEVICES = {
    "unknown": ("lots", r"device='lots': Expected one of"),
    "without memory": ("meta", "its tensors have no memory"),
    "no device": (3, "a device is a str or a torch.device, not a int"),
}


@pytest.mark.parametrize(("device", "match"), BAD_DEVICES.values(), ids=BAD_DEVICES)
def test_a_device_that_cannot_be_limited_is_refused(device, match):
    with pytest.raises(AdaptiveUsageError, match=match):
        memory_budget("1KiB", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(AdaptiveUsageError, match="'cuda': this machine, or this build of torch"):
        memory_budget("1KiB", "cuda")


def test_a_gradient_that_autograd_adds_to_in_place_counts_once():
    """Autograd adds out of place while a mode is open: the budget counts as if none were."""
    weight = torch.ones(16, 64, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        columns_loss(weight).backward()
    changes = [event.nbytes() for event in memory_events(profile)]
    peak_bytes = max(itertools.accumulate(changes))
    gradient_bytes = 64 * 64 * 4
    weight.grad = None
    with memory_budget(peak_bytes) as outer, memory_budget(peak_bytes) as inner:
        columns_loss(weight).backward()
    # scalars that the allocator rounds up make the difference
    assert peak_bytes - gradient_bytes // 4 < inner.peak_bytes <= peak_bytes
    assert (outer.peak_bytes, outer.live_bytes) == (inner.peak_bytes, inner.live_bytes)
    assert inner.live_bytes == weight.grad.nbytes
