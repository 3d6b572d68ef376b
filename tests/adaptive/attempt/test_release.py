"""What a retry lets go of the frames that an error came through, and what it leaves alone."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import simple

pytestmark = pytest.mark.usefixtures("no_gc")


def fails():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def results_of(jobs):
    for job in jobs:
        try:
            result = job()
        except Exception as error:
            result = error
        yield result


class Holder:
    """An iterator that no frame refers to directly."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


@pytest.mark.parametrize("held", [iter, Holder])
def test_a_generator_of_the_caller_goes_on_after_an_error_that_came_through_it(held):
    done = []
    for result in held(results_of([lambda: 1, fails, lambda: 2, lambda: 3])):

        def work(size, result=result):
            if isinstance(result, Exception) and size > 1:
                raise result
            return "failed" if isinstance(result, Exception) else result

        done.append(simple.batch(work, 4))
    assert done == [1, "failed", 2, 3]


def test_a_coroutine_of_the_caller_goes_on_after_an_error_that_came_through_it():
    class Pause:
        def __await__(self):
            yield

    async def survives():
        try:
            fails()
        except torch.OutOfMemoryError as error:
            caught.append(error)
        await Pause()
        return "done"

    caught = []
    coroutine = survives()
    coroutine.send(None)
    assert simple.batch(refuse_once(caught.pop()), 4) == 2
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    assert end.value.value == "done"


def refuse_once(error):
    def work(size):
        if size > 2:
            raise error
        return size

    return work


@pytest.mark.parametrize("n_around", [0, 1, 2])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_generator_that_only_the_attempt_held_lets_go_of_its_variables(n_around, is_ended):
    class Local:
        pass

    def made():
        local = Local()
        refs.append(weakref.ref(local))
        try:
            fails()
        except torch.OutOfMemoryError as error:
            kept.append(error.__traceback__)
            yield error
        if is_ended:
            yield from ()

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
            error = next(items)
            if is_ended:
                list(items)
            raise error
        assert [ref() for ref in refs] == [None]
        return size

    refs, kept = [], []
    assert simple.batch(work, 4) == 2


def test_an_iterator_that_the_attempt_handed_out_stays_open():
    handed_out = []

    def work(size):
        if size == 4:
            handed_out.append(results_of([fails, lambda: "next"]))
            raise next(handed_out[0])
        return size

    assert simple.batch(work, 4) == 2
    assert next(handed_out[0]) == "next"


def test_a_checkpoint_that_failed_packs_nothing_of_the_next_attempt():
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
