"""The attempt routine: what a failed attempt leaves behind, and what is tried after it."""

import gc
import random
import sys
import traceback
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tenure import DisposedTensorError, NewDisposeScope, is_disposed, owner_of
from tenure.adaptive import (
    NoBatchsizeCache,
    OutOfRetriesError,
    add_listener,
    batch,
    remove_listener,
    simple,
    statistics,
)

from .failures import on_sim, oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def run(work, size=4, **options):
    work.__qualname__ = work.__name__
    return batch(initial_batchsize=size, cache_type=NoBatchsizeCache, **options)(work)()


def test_the_collector_is_off_while_a_failure_is_handled():
    """Nobody would count the bytes that an automatic collection frees."""
    seen = []

    def work(size):
        seen.append(gc.isenabled())
        return refuse_above(2)(size)

    def on_retry(event):
        seen.append(gc.isenabled())

    assert run(work, on_retry=on_retry) == 2
    assert gc.isenabled()
    assert seen == [True, False, True]


# the awkward ways in which a failed attempt outlives its frame


def kept_in_a_local(error):
    kept = error  # noqa: F841  # a cycle: the frame holds the exception, that holds the frame
    raise error


def chained(error):
    try:
        raise error
    except RuntimeError as cause:
        raise ValueError("could not make the batch") from cause


def kept_by_sys(error):
    try:
        raise error
    except RuntimeError:
        sys.last_exc = sys.last_value = sys.exception()
        sys.last_traceback = sys.exception().__traceback__
        raise


def grouped(error):
    errors = []
    for each in (error, ValueError("another")):
        try:
            raise each
        except Exception as caught:
            errors.append(caught)
    raise ExceptionGroup("tasks failed", errors)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("escape", [kept_in_a_local, chained, kept_by_sys, grouped])
def test_every_tensor_of_a_failed_attempt_is_dead_at_the_retry(escape):
    made, outer, dead_at_retry = [], [], []

    def work(size):
        if made:
            dead_at_retry.extend(ref() is None for ref in made)
            made.clear()
        activation = torch.ones(size, requires_grad=True) * 2
        factor = torch.ones(size)  # the graph saves it
        loss = (activation.exp() * factor).sum()
        outer.append(loss)
        made.append(weakref.ref(activation))
        made.extend(weakref.ref(each.untyped_storage()) for each in (activation, factor, loss))
        if size > 1:
            escape(torch.OutOfMemoryError(OOM))
        return size

    assert run(work) == 1
    assert dead_at_retry == [True] * 8
    assert [is_disposed(loss) for loss in outer] == [True, True, False]
    with pytest.raises(DisposedTensorError, match=r"'attempt of work at batch size 4'> .+ owned"):
        outer[0].sum()


def test_what_a_success_makes_belongs_to_the_scope_around():
    kept = []

    def work(size):
        kept.append(torch.ones(size))
        return torch.zeros(size)

    with NewDisposeScope("outer") as outer:
        result = run(work)
        assert owner_of(result) is owner_of(kept[0]) is outer
    assert is_disposed(result)
    result = run(work)
    assert owner_of(result) is None
    assert not is_disposed(result)


def test_an_exception_handled_around_the_call_keeps_its_traceback_and_its_frames():
    def fails(tensor):
        raise ValueError("of the caller")

    try:
        fails(torch.ones(3))
    except ValueError as outside:
        run(refuse_above(1))
        kept = outside
    assert kept.__traceback__.tb_next.tb_frame.f_locals["tensor"].shape == (3,)


def refuse_above(limit, text=OOM):
    def work(size):
        if size > limit:
            raise RuntimeError(text)
        return size

    return work


def test_giving_up_says_what_was_tried_and_comes_from_the_last_error_which_holds_no_tensor():
    made = []

    def work(size):
        activation = torch.ones(size)
        made.append(weakref.ref(activation))
        raise RuntimeError("sim:9 out of memory. Tried to allocate 3.1 GiB")

    with pytest.raises(OutOfRetriesError) as caught:
        run(work)
    assert str(caught.value) == (
        "3 attempts of 'work' ran out of sim:9 memory (batch size 4, 2, 1; needed 3.1 GiB). Not "
        "even 1 fits: free memory, make the model or the sample smaller, or page the model."
    )
    assert caught.value.sizes == (4, 2, 1)
    assert caught.value.info.device == "sim:9"
    assert type(caught.value.__cause__) is RuntimeError
    # it still shows its lines
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert frames[-1].name == "work"
    assert [ref() for ref in made] == [None, None, None]


@pytest.mark.parametrize(("error", "in_oom"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_another_error_goes_on_and_what_was_drawn_is_undone(error, in_oom):
    kept = []

    def work(size):
        kept.append(torch.rand(2))
        try:
            if in_oom:
                raise torch.OutOfMemoryError(OOM)
        finally:
            raise error

    before = torch.get_rng_state()
    with pytest.raises(error):
        run(work, restore_rng=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_disposed(kept[0])


def test_an_undoing_that_is_interrupted_is_done_again():
    class Numbers(random.Random):
        is_interrupted = False

        def setstate(self, state):
            if not self.is_interrupted:
                self.is_interrupted = True
                raise KeyboardInterrupt
            super().setstate(state)

    @batch(initial_batchsize=4, restore_rng=True, cache_type=NoBatchsizeCache)
    def work(size, numbers):
        drawn.append(numbers.random())
        refuse_above(1)(size)

    numbers, drawn = Numbers(5), []
    with pytest.raises(KeyboardInterrupt):
        work(numbers)
    assert drawn == [random.Random(5).random()] == [numbers.random()]


def test_an_error_that_broke_more_than_the_attempt_is_not_retried():
    def work(size):
        sizes.append(size)
        raise torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")

    sizes = []
    with pytest.raises(torch.distributed.DistBackendError):
        run(work)
    assert sizes == [4]


def test_each_new_size_is_logged_in_one_line_and_told_to_listeners(caplog):
    heard, mine = [], []
    add_listener(heard.append)
    try:
        run(refuse_above(1), on_retry=mine.append)
    finally:
        remove_listener(heard.append)
    assert [record.getMessage() for record in caplog.records] == [
        "tenure: 'work' ran out of cuda memory at batch size 4 (needed 2.0 GiB more); "
        "begins again with 2, and may grow from there.",
        "tenure: 'work' ran out of cuda memory at batch size 2 (needed 2.0 GiB more); "
        "begins again with 1, and may grow from there.",
    ]
    told = [(event.kind, event.size, event.next_size) for event in heard]
    assert told == [("shrink", 4, 2), ("shrink", 2, 1)]
    assert mine == heard


def test_statistics_count_on_this_thread():
    counts = statistics()
    counts.reset()
    run(refuse_above(1))
    assert str(counts) == (
        "3 attempts, 2 out of memory: 0 tried again, 2 made smaller, 0 given up; 0 made larger"
    )
    assert statistics() is counts


# --- an error that is handled around the call


def test_an_oom_that_is_handled_around_the_call_makes_no_other_error_one():
    tried = []

    def work(size):
        tried.append(size)
        raise error

    try:
        raise torch.OutOfMemoryError(OOM)
    except torch.OutOfMemoryError as outside:
        for error in (ValueError("a bug"), outside):
            with pytest.raises(type(error)) as caught:
                run(work, 64)
            assert caught.value is error
    assert tried == [64, 64]


def test_an_oom_of_the_attempt_counts_also_inside_a_handler_and_under_another_error():
    def work(size):
        if size > 16:
            try:
                raise torch.OutOfMemoryError(OOM)
            except torch.OutOfMemoryError:
                raise ValueError("could not make the batch")  # noqa: B904  # the context tells
        return size

    try:
        raise torch.OutOfMemoryError(OOM)
    except torch.OutOfMemoryError:
        assert run(work, 64) == 16


# --- memory in pieces


def test_giving_up_tells_how_the_memory_was_cut_up(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = [on_sim(4 << 20) for _ in range(25)][::5]
    with pytest.raises(OutOfRetriesError) as caught:
        run(lambda size: on_sim(size * 20 << 20), size=2)
    assert str(caught.value) == (
        "2 attempts of '<lambda>' ran out of sim:0 memory (batch size 2, 1; needed 20.0 MiB, free "
        "0 B). At the last, 80.0 MiB were reserved and not allocated, in pieces: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts. Not even 1 fits: "
        "free memory, make the model or the sample smaller, or page the model."
    )
    del kept


# --- what a retry lets go of the frames that an error came through, and what it leaves alone


def results_of(jobs):
    for job in jobs:
        try:
            result = job()
        except Exception as error:
            result = error
        yield result


def test_a_generator_of_the_caller_goes_on_after_an_error_that_came_through_it(no_gc):
    done = []
    for result in results_of([lambda: 1, oom, lambda: 2, lambda: 3]):

        def work(size, result=result):
            if isinstance(result, Exception) and size > 1:
                raise result
            return "failed" if isinstance(result, Exception) else result

        done.append(simple.batch(work, 4))
    assert done == [1, "failed", 2, 3]


@pytest.mark.parametrize("n_around", [0, 2])
def test_a_generator_that_only_the_attempt_held_lets_go_of_its_variables(n_around, no_gc):
    class Local:
        pass

    def made():
        local = Local()
        refs.append(weakref.ref(local))
        try:
            oom()
        except torch.OutOfMemoryError as error:
            kept.append(error.__traceback__)
            yield error

    def around(items):
        for item in items:
            try:
                raise item
            except torch.OutOfMemoryError as error:
                yield error

    def work(size):
        if size == 4:
            items = made()
            for _ in range(n_around):
                items = around(items)
            raise next(items)
        assert [ref() for ref in refs] == [None]
        return size

    refs, kept = [], []
    assert simple.batch(work, 4) == 2


def test_a_checkpoint_that_failed_packs_nothing_of_the_next_attempt(no_gc):
    """Up to torch 2.12 its hooks stay on until its frames are freed, which the error holds."""
    kept, leaf = [], torch.ones(4, requires_grad=True)

    def inner(part):
        if len(part) > 1:
            kept.append(torch.OutOfMemoryError("CUDA out of memory."))
            raise kept[-1]
        return part.sin()

    def outer(part):
        return checkpoint(inner, part, use_reentrant=False)

    def work(size):
        product = leaf[:size].exp()
        # what it saves is packed by whatever hooks are on
        assert len(leaf) == size or product.grad_fn._raw_saved_result.unpack_hook is None
        return checkpoint(outer, leaf[:size], use_reentrant=False)

    assert simple.batch(work, 4).shape == (1,)
    assert len(kept) == 2
    assert leaf.exp().grad_fn._raw_saved_result.unpack_hook is None
