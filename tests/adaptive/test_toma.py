"""What toma's and accelerate's own tests say of toma's names, and that toma's defects are gone."""

import gc
import inspect
import threading
import weakref

import numpy as np
import pytest
import torch

from tenure import adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    OutOfRetriesError,
    StacktraceMemoryBatchsizeCache,
    execute,
    explicit,
    simple,
)

from .attempt.failures import oom

# --- toma's tests of simple and explicit


def always(*args):
    oom()


@pytest.mark.parametrize("call", [simple, explicit])
def test_what_never_fits_fails(call):
    told = r"^7 attempts of 'always' ran out of cuda memory"
    with pytest.raises(OutOfRetriesError, match=told) as caught:
        call.batch(always, 64)
    assert caught.value.sizes == (64, 32, 16, 8, 4, 2, 1)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(OutOfRetriesError, match=r"step 64, 32, 16, 8, 4, 2, 1; needed 2\.0 GiB"):
        call.range(always, 0, 64, 64)


@pytest.mark.parametrize(
    ("cache_type", "tried"),
    [
        (NoBatchsizeCache, [64, 32, 16] * 3),
        (GlobalBatchsizeCache, [64, 32, 16, 16, 16]),
        (None, [64, 32, 16, 16, 64, 32, 16]),
    ],
    ids=["nowhere", "for the function", "for the call"],
)
def test_a_size_is_remembered_by_the_type_of_the_cache(only_16, sizes, cache_type, tried):
    for _ in range(2):
        explicit.batch(only_16, 64, toma_cache_type=cache_type)
    explicit.batch(only_16, 64, toma_cache_type=cache_type)
    assert sizes == tried


def test_two_calls_on_one_line_are_two_calls(only_16, sizes):
    both = explicit.batch(only_16, 64), explicit.batch(only_16, 64)
    assert both == (16, 16)
    assert sizes == [64, 32, 16, 64, 32, 16]


def test_range_and_chunked_pass_on_more_arguments():
    seen = []
    simple.range(lambda start, end, a, b: seen.append((start, end, a, b)), 0, 3, 2, "a", b="b")

    def note(chunk, start, end, a, b):
        seen.append((*chunk.shape, start, end, a, b))

    simple.chunked(note, torch.ones(2, 3), 2, 1, "a", b="b")
    explicit.chunked(note, torch.ones(2), 1, "a", b="b")
    assert seen == [
        (0, 2, "a", "b"),
        (2, 3, "a", "b"),
        (2, 2, 0, 2, "a", "b"),
        (2, 1, 2, 3, "a", "b"),
        (1, 0, 1, "a", "b"),
        (1, 1, 2, "a", "b"),
    ]


# --- toma's tests of the decorators


def test_a_block_that_is_executed_shares_its_size_with_itself(sizes):
    for _ in range(2):

        @execute.batch(initial_batchsize=64, cache_type=StacktraceMemoryBatchsizeCache)
        def found(batchsize):
            sizes.append(batchsize)
            if batchsize != 16:
                oom()
            return batchsize

        assert found == 16
    assert sizes == [64, 32, 16, 16]


def test_chunks_that_are_executed():
    tensor = torch.zeros(5, 6)

    @execute.chunked(tensor, initial_step=4, dimension=1, collect="list")
    def places(chunk, start, end):
        chunk[:] = 1
        return start, end

    assert places == [(0, 4), (4, 6)]
    assert torch.equal(tensor, torch.ones(5, 6))


def test_decorators_work_without_arguments(only_16, sizes):
    f = adaptive.batch(only_16)
    assert f(toma_initial_batchsize=64) == 16

    @adaptive.chunked
    def whole(chunk, start, end):
        sizes.append(len(chunk))

    @adaptive.range
    def all_of(start, end):
        sizes.append(end - start)

    whole(torch.ones(7))
    all_of(3, 12)
    assert sizes == [64, 32, 16, 7, 9]


# --- defects of toma


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("cache_type", [GlobalBatchsizeCache, None])
def test_nothing_that_a_function_captured_is_kept(cache_type):
    def called():
        captured = torch.ones(3)

        def f(batchsize):
            if batchsize > 16:
                oom()
            return captured.sum()

        explicit.batch(f, 64, toma_cache_type=cache_type)
        decorated = adaptive.batch(initial_batchsize=64, cache_type=cache_type)(f)
        decorated()
        return [weakref.ref(captured), weakref.ref(f), weakref.ref(decorated)]

    assert [reference() for reference in called()] == [None] * 3


def test_the_default_cache_type_can_be_set(only_16, sizes, monkeypatch):
    f = adaptive.batch(initial_batchsize=64)(only_16)
    monkeypatch.setattr(adaptive, "DEFAULT_CACHE_TYPE", GlobalBatchsizeCache)
    f()
    f()
    monkeypatch.setattr(adaptive, "DEFAULT_CACHE_TYPE", NoBatchsizeCache)
    f()
    assert sizes == [64, 32, 16, 16, 64, 32, 16]
    monkeypatch.setattr(adaptive, "DEFAULT_CACHE_TYPE", "none")
    told = r"^tenure\.adaptive\.DEFAULT_CACHE_TYPE is 'none', which is no"
    with pytest.raises(AdaptiveUsageError, match=told):
        f()


def test_a_nested_call_of_the_same_context_does_not_repeat_or_skip_anything():
    seen = []
    inner_failed = []

    @adaptive.range(initial_step=8, cache_type=GlobalBatchsizeCache)
    def walk(start, end, depth):
        if depth:
            if end - start > 2 and not inner_failed:
                inner_failed.append(start)
                oom()
            return
        walk(0, 8, depth=1)
        seen.extend(range(start, end))

    walk(0, 32, depth=0)
    assert inner_failed
    assert seen == list(range(32))


def test_work_that_fits_at_no_size_inside_makes_the_work_around_it_smaller():
    @adaptive.batch(initial_batchsize=2)
    def inner(batchsize, n_rows):
        if batchsize * n_rows > 16:
            oom()
        return batchsize, n_rows

    @adaptive.batch(initial_batchsize=64)
    def outer(n_rows):
        return inner(n_rows)

    assert outer() == (1, 16)


def test_threads_that_share_a_size_work_on_everything_once():
    lock = threading.Lock()
    seen = {name: [] for name in range(4)}
    n_failures = [0]
    called = dict.fromkeys(seen, False)
    turn = threading.Barrier(4)

    @adaptive.range(initial_step=64, cache_type=GlobalBatchsizeCache)
    def walk(start, end, name):
        with lock:
            is_first = not called[name]
            called[name] = True
        if is_first:
            turn.wait()  # all have begun with 64 before one of them fails
        with lock:
            due = end - start > 8 and n_failures[0] < 40 and (start + name) % 3 == 0
            if is_first or due:
                n_failures[0] += 1
                oom()
        seen[name].extend(range(start, end))

    def run(name):
        for _ in range(10):
            walk(0, 256, name)

    threads = [threading.Thread(target=run, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert n_failures[0] >= 4
    assert all(numbers == list(range(256)) * 10 for numbers in seen.values())


def test_nothing_is_collected_or_emptied_while_everything_fits(monkeypatch):
    def never(*args):
        raise AssertionError("collected")

    monkeypatch.setattr(gc, "collect", never)
    monkeypatch.setattr(torch.cuda, "empty_cache", never)
    monkeypatch.setattr(inspect, "stack", never)
    adaptive.chunked(initial_step=2)(lambda chunk, start, end: None)(torch.ones(8))
    explicit.batch(lambda batchsize: None, 8)


# --- accelerate's tests


def test_where_a_size_has_worked_and_none_does_the_error_speaks_of_a_leak():
    kept = []

    @adaptive.batch(initial_batchsize=64)
    def leaking(batchsize):
        kept.append(batchsize)
        if len(kept) * batchsize > 64:
            oom()

    def loop():
        while len(kept) < 99:
            leaking()

    with pytest.raises(OutOfRetriesError) as caught:
        loop()
    assert str(caught.value).endswith(
        "Not even 1 fits: free memory, make the model or the sample smaller, or page the model. "
        "Batch size 1 has worked here before: if sizes shrink from call to call, something keeps "
        "memory, and tenure.NewDisposeScope(policy='report') around a call names it."
    )


def test_numbers_of_numpy_are_numbers():
    found = []

    def note(*args):
        found.append(args[-2:])

    adaptive.range(initial_step=np.int32(2))(note)(np.int64(1), np.int64(4))
    execute.range(np.int64(0), np.int64(1), np.int64(2))(note)
    assert found == [(1, 3), (3, 4), (0, 1)]
    assert {type(number) for pair in found for number in pair} == {int}
    found.clear()
    x = torch.ones(2, 3)
    adaptive.chunked(initial_step=2, dimension=np.int64(1))(note)(x)
    assert found == [(0, 2), (2, 3)]
