"""Functions and coroutines in scopes of their own, and blocks and functions in none."""

import asyncio
import contextlib
import functools
from typing import NamedTuple

import pytest
import torch

from tenure import (
    NewDisposeScope,
    ScopeUsageError,
    ScopeUsageWarning,
    current_scope,
    is_disposed,
    move_to_outer,
    owner_of,
    persist,
    scoped,
)


class Output(NamedTuple):
    logits: torch.Tensor
    extra: list


# --- functions


def test_the_result_moves_to_the_callers_scope_and_the_rest_goes():
    leftovers = []

    @scoped
    def work(x):
        leftovers.append(x + 1)
        return {"out": x * 2, "none": None, "n": 3}

    with NewDisposeScope() as caller:
        given = torch.ones(2)
        result = work(given)
        assert owner_of(result["out"]) is caller
        assert owner_of(given) is caller
        assert is_disposed(leftovers[0])
    assert is_disposed(result["out"])
    result = scoped(lambda x: Output(x + 1, [x + 2]))(torch.ones(1))
    assert owner_of(result.logits) is None
    assert result.extra[0].item() == 3


def test_methods_partials_and_recursion_are_functions():
    class Doubler(torch.nn.Module):
        @scoped
        def forward(self, x, n=1):
            return x * 2 if n == 1 else self(x, n - 1) * 2

    assert Doubler()(torch.ones(1), 3).item() == 8
    assert scoped(functools.partial(torch.full, (1,)))(3.0).item() == 3
    assert scoped(lambda: None)() is None


def test_the_options_of_a_scope_apply_and_its_name_is_that_of_the_function():
    @scoped
    def plain():
        return current_scope().name

    @scoped(name="mine", on_error="keep")
    def fail():
        kept.append((torch.ones(1), current_scope().name))
        raise ValueError("mine")

    kept = []
    with pytest.raises(ValueError, match="mine"):
        fail()
    assert (kept[0][0].item(), kept[0][1]) == (1, "mine")
    assert plain().endswith("plain")
    assert plain.__name__ == "plain"
    with pytest.raises(ScopeUsageError, match="policy='loud' is not one of"):
        scoped(policy="loud")(print)


async def requests():
    yield torch.ones(1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *((wrong, "Decorate the function itself") for wrong in (int, "text", classmethod(print))),
        (requests, "the generator function .*requests.*makes each item"),
        (lambda: (yield), "the generator function"),
    ],
)
def test_what_is_no_function_is_refused(wrong, told):
    with pytest.raises(ScopeUsageError, match=rf"@scoped got .*{told}"):
        scoped(wrong)


def test_a_block_in_a_generator_warns_where_it_stands_but_not_in_a_context_manager():
    def work():
        with NewDisposeScope("inner"):
            yield 1

    def ended():
        for n in range(2):
            with NewDisposeScope("item") as scope:
                try:
                    made = move_to_outer(torch.ones(n))
                finally:
                    assert len(scope) == 0
            yield made

    @contextlib.contextmanager
    def step():
        with NewDisposeScope("step") as scope:
            yield scope

    assert [len(item) for item in ended()] == [0, 1]
    with pytest.warns(ScopeUsageWarning, match=r"inside the generator .*work\(\)") as caught:
        list(work())
    assert caught[0].filename == __file__
    with step() as scope:
        made = torch.ones(1)
        assert owner_of(made) is scope
    assert is_disposed(made)


# --- tasks


def test_interleaved_tasks_do_not_see_each_others_scopes():
    @scoped
    async def work(n):
        scope, kept = current_scope(), torch.full((1,), float(n))
        for _ in range(3):
            await asyncio.sleep(0)
            assert current_scope() is scope
            made = kept + 1
            assert owner_of(made) is scope
        return made

    async def bystander():
        await asyncio.sleep(0)
        return owner_of(torch.ones(1))

    async def late(closed):
        await closed.wait()
        return current_scope(), owner_of(torch.ones(1))

    async def main():
        closed, outside = asyncio.Event(), asyncio.create_task(bystander())
        with NewDisposeScope() as outer:
            results = await asyncio.gather(*[work(n) for n in range(5)])
            assert all(owner_of(result) is outer for result in results)
            assert [result.item() for result in results] == [1, 2, 3, 4, 5]
            assert await outside is None
            outlives = asyncio.create_task(late(closed))
            assert await asyncio.to_thread(lambda: owner_of(torch.ones(1))) is None
        closed.set()
        assert await outlives == (None, None)

    asyncio.run(main())
    assert current_scope() is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_cancelled_task_closes_its_scope_also_of_an_object_with_an_async_call():
    class Service:
        async def __call__(self):
            held.append(torch.ones(1))
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(scoped(Service())())
        await asyncio.sleep(0)
        assert owner_of(held[0]) is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    held = []
    asyncio.run(main())
    assert is_disposed(held[0])


# --- in none


def test_what_is_made_in_persist_belongs_to_no_scope():
    with NewDisposeScope() as scope:
        with persist():
            kept = torch.ones(1)
            assert current_scope() is None
            with NewDisposeScope() as inner:
                assert inner.outer is None
                moved = inner.move_to_outer(torch.ones(1))
                temporary = torch.ones(1)
            assert owner_of(moved) is None
            with persist():
                pass
            assert current_scope() is None
        with pytest.raises(ValueError, match="mine"), persist():
            raise ValueError("mine")
        assert current_scope() is scope
        made = torch.ones(1)
    assert [is_disposed(t) for t in (kept, moved, temporary, made)] == [False, False, True, True]


def test_persist_decorates_a_function_that_fills_a_cache_and_recurses():
    cache = {}

    @persist()
    def cached(n):
        if n not in cache:
            cache[n] = torch.full((1,), float(n)) + (cached(n - 1) if n else 0)
        return cache[n]

    with NewDisposeScope():
        total = cached(3) + 0
    assert is_disposed(total)
    assert cache[3].item() == 6
    with pytest.raises(ScopeUsageError, match=r"takes no argument and got <function .*Write @per"):
        persist(cached)


def test_persist_does_not_return_to_a_scope_that_closed_meanwhile():
    scope = NewDisposeScope().__enter__()
    with persist():
        scope.close()
    assert current_scope() is None
    assert not is_disposed(torch.ones(1))
    with NewDisposeScope() as later:
        assert later.outer is None
