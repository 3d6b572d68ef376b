"""Functions and coroutines in scopes of their own."""

import asyncio
import functools
import threading
from typing import NamedTuple

import pytest
import torch

from tenure import (
    NewDisposeScope,
    ScopeUsageError,
    ScopeUsageWarning,
    current_scope,
    is_disposed,
    owner_of,
    scoped,
)


class Output(NamedTuple):
    logits: torch.Tensor
    extra: list


class TestFunctions:
    def test_the_result_moves_to_the_callers_scope_and_the_rest_goes(self):
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

    def test_without_a_callers_scope_the_result_is_free(self):
        result = scoped(lambda x: Output(x + 1, [x + 2]))(torch.ones(1))
        assert owner_of(result.logits) is None
        assert result.extra[0].item() == 3

    def test_a_function_may_return_nothing_and_recurse(self):
        @scoped
        def factorial(n):
            return torch.ones(1) if n == 0 else factorial(n - 1) * n

        assert factorial(5).item() == 120
        assert scoped(lambda: None)() is None

    def test_the_scope_is_named_after_the_function_unless_told_otherwise(self):
        @scoped
        def plain():
            return current_scope().name

        @scoped(name="mine", capture="site")
        def named():
            return current_scope().name, current_scope().capture

        assert plain().endswith("plain")
        assert named() == ("mine", "site")
        assert plain.__name__ == "plain"

    def test_methods_forward_and_partials_are_functions(self):
        class Doubler(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

            @scoped
            def forward(self, x):
                return x * self.weight

            @staticmethod
            @scoped
            def make():
                return torch.ones(1)

            @classmethod
            @scoped
            def name(cls):
                return cls.__name__

        assert Doubler()(Doubler.make()).item() == 2
        assert Doubler.name() == "Doubler"
        assert scoped(functools.partial(torch.full, (1,)))(3.0).item() == 3

    def test_the_exception_of_a_function_goes_on(self):
        @scoped(on_error="keep")
        def fail():
            kept.append(torch.ones(1))
            raise ValueError("mine")

        kept = []
        with pytest.raises(ValueError, match="mine"):
            fail()
        assert kept[0].item() == 1
        assert current_scope() is None

    def test_gradients_flow_through(self):
        x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)

        @scoped
        def work(x):
            hidden = (x * x).exp()
            return hidden.log().sum()

        work(x).backward()
        assert x.grad.tolist() == pytest.approx([4, 6], abs=1e-12)
        assert torch.autograd.gradcheck(work, (x,))
        assert torch.autograd.gradgradcheck(work, (x,))

    @pytest.mark.parametrize("wrong", [int, 5, "text", classmethod(print), torch.nn.Linear])
    def test_what_is_no_function_is_refused(self, wrong):
        with pytest.raises(ScopeUsageError, match=r"@scoped got .* Decorate the function itself"):
            scoped(wrong)

    def test_wrong_options_fail_where_they_are_written(self):
        with pytest.raises(ScopeUsageError, match="policy='loud' is not one of"):
            scoped(policy="loud")(print)


class TestGenerators:
    def test_one_is_refused_by_name(self):
        def batches():
            yield torch.ones(1)

        async def requests():
            yield torch.ones(1)

        for function in (batches, requests):
            told = rf"the generator function .*{function.__name__}.*makes each item"
            with pytest.raises(ScopeUsageError, match=told):
                scoped(function)

    def test_a_plain_block_in_a_generator_warns_where_it_stands(self):
        def work():
            with NewDisposeScope("inner"):
                yield 1

        with pytest.warns(ScopeUsageWarning, match=r"inside the generator .*work\(\)") as caught:
            list(work())
        assert caught[0].filename == __file__

    def test_a_context_manager_written_as_a_generator_is_exempt(self):
        import contextlib

        @contextlib.contextmanager
        def step():
            with NewDisposeScope("step") as scope:
                yield scope

        with step() as scope:
            made = torch.ones(1)
            assert owner_of(made) is scope
        assert is_disposed(made)


class Service:
    async def __call__(self, x):
        await asyncio.sleep(0)
        assert current_scope() is not None
        return x * 2


class TestAsync:
    def test_interleaved_tasks_do_not_see_each_others_scopes(self):
        @scoped
        async def work(n):
            scope, kept = current_scope(), torch.full((1,), float(n))
            for _ in range(3):
                await asyncio.sleep(0)
                assert current_scope() is scope
                made = kept + 1
                assert owner_of(made) is scope
            return made

        async def main():
            with NewDisposeScope() as outer:
                results = await asyncio.gather(*[work(n) for n in range(5)])
                assert all(owner_of(result) is outer for result in results)
                return [result.item() for result in results]

        assert asyncio.run(main()) == [1, 2, 3, 4, 5]
        assert current_scope() is None
        assert torch._C._len_torch_function_stack() == 0

    def test_a_task_outside_any_scope_is_not_tracked_meanwhile(self):
        async def bystander():
            await asyncio.sleep(0)
            made = torch.ones(1)
            assert owner_of(made) is None
            return made

        async def main():
            task = asyncio.create_task(bystander())
            with NewDisposeScope():
                made = await task
            return made

        assert asyncio.run(main()).item() == 1

    def test_a_task_that_outlives_its_scope_makes_free_tensors(self):
        async def late(closed):
            await closed.wait()
            made = torch.ones(1)
            assert current_scope() is None
            return made

        async def main():
            closed = asyncio.Event()
            with NewDisposeScope():
                task = asyncio.create_task(late(closed))
                await asyncio.sleep(0)
            closed.set()
            return await task

        assert asyncio.run(main()).item() == 1

    def test_a_cancelled_task_closes_its_scope(self):
        held = []

        @scoped
        async def work():
            held.append(torch.ones(1))
            await asyncio.sleep(60)

        async def main():
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert is_disposed(held[0])

    @pytest.mark.parametrize("end", ["close", "send"])
    def test_ending_on_another_thread_is_refused(self, end):
        held, errors = [], []

        class Pause:
            def __await__(self):
                yield

        @scoped
        async def work():
            held.append(torch.ones(1))
            await Pause()

        def finish():
            try:
                coroutine.close() if end == "close" else coroutine.send(None)
            except ScopeUsageError as error:
                errors.append(str(error))

        coroutine = work()
        coroutine.send(None)
        scope = owner_of(held[0])
        thread = threading.Thread(target=finish, name="other")
        thread.start()
        thread.join()
        assert "from thread 'other'" in errors[0]
        assert scope.is_open
        assert not is_disposed(held[0])
        scope.close()
        assert is_disposed(held[0])

    def test_to_thread_sees_no_scope(self):
        def work():
            return current_scope(), owner_of(torch.ones(1))

        async def main():
            with NewDisposeScope():
                return await asyncio.to_thread(work)

        assert asyncio.run(main()) == (None, None)

    def test_an_object_with_an_async_call_is_scoped_while_it_runs(self):
        assert asyncio.run(scoped(Service())(torch.ones(1))).item() == 2
