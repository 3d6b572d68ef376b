"""memory_budget on the CPU: what counts, what is refused, and what is left after a refusal."""

import copy
import itertools
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from tenure import NewDisposeScope, TenureError
from tenure.adaptive import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    memory_budget,
    set_cpu_memory_limit,
)
from tests.programs import run_program

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
        # once, and as long as any view lives
        kept = kept[:10].view(2, 5)
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


def test_a_refused_copy_is_not_in_use():
    before, match = ones(2000), r"limit of 1\.0 KiB .* is free; 100 B \(100 bytes\) is in use"
    with memory_budget(1024):
        kept = ones(100)
        with pytest.raises(OOM, match=match):
            copy.deepcopy(before)
    assert kept.nbytes == 100


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


MADE = {
    "torch.tensor": (lambda _: torch.tensor([1.0, 2.0]), 8),
    "deepcopy": (copy.deepcopy, 400),
    "a view": (lambda x: x[1:], 0),
    "from_numpy": (lambda _: torch.from_numpy(np.ones(8)), 0),
    "set_ to an old storage": (lambda x: torch.empty(0).set_(x.untyped_storage()), 0),
    "grown": (lambda x: x.resize_(150), 200),
    "out=": (lambda x: torch.add(x, 1, out=torch.empty(0)), 400),
    "sparse": (lambda _: torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
    # the columns of CSR are one row of COO indices
    "sparse_csr": (lambda _: torch.eye(3).to_sparse_csr(), 4 * 8 + 2 * 3 * 8 + 3 * 4),
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


# --- growth in place


def test_a_refused_resize_leaves_the_tensor_as_it_was():
    with memory_budget(100) as budget:
        kept = ones(12).view(3, 4).t()
        with pytest.raises(OOM, match=r"Tried to allocate 988 B .* in aten\.resize_"):
            kept.resize_(1000)
        assert (kept.shape, kept.stride(), kept.untyped_storage().nbytes()) == ((4, 3), (1, 4), 12)
        assert budget.live_bytes == 12
        assert kept.sum() == 12


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_a_refused_out_argument_keeps_its_shape_and_gives_back_what_it_grew():
    first, out = ones(60), ones(4)
    with memory_budget(100) as budget:
        with pytest.raises(OOM, match=r"in aten\.cat\.out"):
            torch.cat([first, first], out=out)
        assert (out.shape, out.untyped_storage().nbytes(), budget.live_bytes) == ((4,), 4, 0)


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


def test_after_the_block_nothing_is_limited_and_nothing_is_watched(no_gc):
    with memory_budget(10) as budget:
        kept = ones(10)
    dead = weakref.ref(budget)
    assert ones(100).shape == (100,)
    assert torch._C._len_torch_dispatch_stack() == 0
    del budget
    assert dead() is None
    del kept


def test_an_interrupt_at_any_instruction_leaves_no_budget_behind():
    # a program, for the trace function of a test run is another's
    program = """
        import signal
        import sys
        import torch
        from tenure import _account, adaptive
        FILES = "_budget.py", "_counting.py", "_live_storages.py", "_account.py", "_interrupts.py"

        def on_event(frame, event, arg):
            global n_left
            if not frame.f_code.co_filename.endswith((*FILES, "resizing.py", "_dispatch.py")):
                return None
            frame.f_trace_opcodes = True
            n_left -= 1
            if n_left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return on_event

        def work():
            with adaptive.memory_budget(400):
                torch.ones(10) + 1

        work()
        n_left = n = 0
        # so many are left when it has run through
        while n_left <= 0:
            n += 3
            n_left = n
            sys.settrace(on_event)
            try:
                work()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            assert torch._C._len_torch_dispatch_stack() == 0, n
            assert torch.ones(1000).shape == (1000,), n
            assert not _account._this_thread.open, n
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, n
        print(n > 900)
    """
    done = run_program(textwrap.dedent(program))
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr


def test_a_budget_that_nobody_keeps_ends_with_a_warning():
    with pytest.warns(AdaptiveUsageWarning, match="is no longer held by anything, and limits noth"):
        memory_budget(10).__enter__()
    assert torch.ones(10).shape == (10,)


def test_a_budget_is_entered_once_and_left_while_it_is_open():
    budget = memory_budget(10)
    with pytest.raises(AdaptiveUsageError, match="not yet open> was closed, but it is not open"):
        budget.__exit__(None, None, None)
    match = r"<memory_budget 10 B on cpu, .*> was entered a second time\. A budget is neither"
    with budget:
        with pytest.raises(AdaptiveUsageError, match=match):
            budget.__enter__()
        with pytest.raises(OOM):
            ones(11)
    with pytest.raises(AdaptiveUsageError, match=match):
        budget.__enter__()
    assert ones(11).shape == (11,)


@pytest.mark.parametrize("error", [None, KeyError("mine")])
def test_an_exit_out_of_order_loses_no_limit_and_hides_no_error_of_the_block(error):
    outer, inner = memory_budget(100), memory_budget(50)
    outer.__enter__()
    inner.__enter__()
    if error is None:
        with pytest.raises(AdaptiveUsageError, match=r"100 B on cpu, closed.* ended before a bu"):
            outer.__exit__(None, None, None)
    else:
        outer.__exit__(KeyError, error, None)
    with pytest.raises(OOM, match="limit of 50 B"):
        ones(51)
    inner.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert ones(200).shape == (200,)


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


def test_a_decorated_function_has_a_budget_for_each_call():
    @memory_budget(100)
    def nested(*sizes):
        made = ones(sizes[0])
        return [made, *nested(*sizes[1:])] if sizes[1:] else [made]

    kept = [nested(100), nested(50, 50)]
    assert len(kept) == 2
    with pytest.raises(OOM, match=r"Tried to allocate 51 B"):
        nested(50, 51)


# --- torch.compile


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_functions_run_uncompiled_inside_and_are_counted():
    function = torch.compile(lambda x: (x.sin() + x.cos()).exp(), backend="aot_eager")
    x = torch.ones(100)
    function(x)
    with memory_budget(1200) as budget:
        kept = function(x)
        assert (budget.live_bytes, budget.peak_bytes) == (kept.nbytes, 1200)
    with memory_budget(1199), pytest.raises(OOM, match=r"in aten\.(add|exp)"):
        function(x)


# --- bad input


def generator():
    yield


REFUSED = {
    "a limit of nothing": (lambda: memory_budget(0), "got a limit of 0 bytes, in which nothing fi"),
    "a negative limit": (lambda: memory_budget(-1), "-1 is not a number of bytes"),
    "a limit in words": (lambda: memory_budget("lots"), "'lots' is not a number of bytes"),
    "no limit": (lambda: memory_budget(None), "can't be read from a NoneType"),
    "a device in words": (lambda: memory_budget(1, "lots"), r"device='lots': Expected one of"),
    "a device without memory": (lambda: memory_budget(1, "meta"), "its tensors have no memory"),
    "no device": (lambda: memory_budget(1, 3), "a device is a str or a torch.device, not a int"),
    "one that is not there": (lambda: memory_budget(1, "mps"), "'mps': this machine, or this bu"),
    "a generator": (lambda: memory_budget(1)(generator), r"generator\(\), which can be suspended"),
    "no function": (lambda: memory_budget(1)(3), "wants a function, and got 3"),
    "a copy": (lambda: copy.copy(memory_budget(1)), "can't be copied or pickled"),
}


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="the device is there")
@pytest.mark.parametrize(("call", "match"), REFUSED.values(), ids=REFUSED)
def test_a_budget_that_can_not_be_is_refused(call, match):
    with pytest.raises(TenureError, match=match):
        call()


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


INDEX, MASK = torch.zeros(64, 1, dtype=torch.long), torch.eye(64, 128, dtype=torch.bool)
LABELS = torch.ones(64, 128)


@pytest.mark.parametrize(
    ("run", "n_copies", "others_bytes"),
    [
        # autograd fills zeros in place
        (lambda x: x.gather(1, INDEX).sum().backward(), 1, 2048),
        (lambda x: x.masked_select(MASK).sum().backward(), 1, 2 * MASK.nbytes),
        # and torch.func out of place
        (lambda x: grad(lambda y: y.gather(1, INDEX).sum())(x.detach()), 2, 2048),
        # a product counts beside its operand
        (lambda x: F.binary_cross_entropy_with_logits(x, LABELS).backward(), 2, 64),
    ],
    ids=["gather", "masked_select", "torch.func", "a product"],
)
def test_a_gradient_counts_as_often_as_autograd_makes_it(run, n_copies, others_bytes):
    logits = torch.zeros(64, 128, requires_grad=True)
    with memory_budget("1GiB") as outer, memory_budget("1GiB") as inner:
        run(logits)
    assert 0 <= inner.peak_bytes - n_copies * logits.nbytes < others_bytes
    assert (outer.peak_bytes, outer.live_bytes) == (inner.peak_bytes, inner.live_bytes)


# --- limits on the memory of the process, each in a process of its own

needs_limits = pytest.mark.skipif(sys.platform == "win32", reason="the system has no RLIMIT_AS")


@needs_limits
def test_past_the_limit_the_cpu_runs_out_of_memory_and_the_first_step_down_is_large_enough():
    # Halving would begin with 4096. Some of the address space comes and goes by itself.
    program = """
        import logging
        import psutil
        import torch
        from tenure import adaptive
        from tenure.adaptive import oom_info
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        events = []

        @adaptive.chunked(initial_step=8192, on_retry=events.append)
        def work(chunk, start, end):
            torch.empty(end - start, 1 << 20, dtype=torch.uint8)[:1].sum()
            chunk += 1

        work(torch.zeros(10), toma_initial_step=2)
        x = torch.zeros(8192)
        adaptive.set_cpu_memory_limit(psutil.Process().memory_info().vms / 2**30 + 0.5)
        work(x)
        print(bool((x == 1).all()), events[0].size, events[0].next_size <= 512, len(events) <= 3)
        try:
            torch.empty(1 << 30, dtype=torch.uint8)
        except RuntimeError as error:
            print(oom_info(error).kind)
    """
    done = run_program(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "8192", "True", "True", "host"]


NO_NUMBER = r"which is no number of GiB\. Give one, such as 8"


@needs_limits
@pytest.mark.parametrize(
    ("gigabytes", "message"),
    [
        *[(each, NO_NUMBER) for each in (0, "8", True, float("nan"))],
        (0.01, r"is less than this process uses already: .* GiB"),
    ],
)
def test_a_limit_that_can_not_be_is_refused_and_changes_nothing(gigabytes, message):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(AdaptiveUsageError, match=message):
        set_cpu_memory_limit(gigabytes)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
