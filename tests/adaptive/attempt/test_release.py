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


def test_a_generator_of_the_caller_goes_on_after_an_error_that_came_through_it():
    done = []
    for result in results_of([lambda: 1, fails, lambda: 2, lambda: 3]):

        def work(size, result=result):
            if isinstance(result, Exception) and size > 1:
                raise result
            return "failed" if isinstance(result, Exception) else result

        done.append(simple.batch(work, 4))
    assert done == [1, "failed", 2, 3]


@pytest.mark.parametrize("n_around", [0, 2])
def test_a_generator_that_only_the_attempt_held_lets_go_of_its_variables(n_around):
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
