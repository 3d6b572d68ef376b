"""Decorated functions: their arguments, their results, and what they are as functions."""

import copy
import inspect
import pickle

import pytest
import torch

from tenure import DisposedTensorError, adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    GlobalBatchsizeCache,
    execute,
    explicit,
)

from ..attempt.failures import oom

pytestmark = pytest.mark.usefixtures("forgetful")


# --- arguments


def test_what_each_call_says_comes_before_what_the_decorator_says(sizes):
    @adaptive.chunked(initial_step=2, dimension=0)
    def f(chunk, start, end, *args, **kwargs):
        sizes.append((chunk.shape, args, kwargs))

    f(torch.ones(4, 3), 1, key=2)
    f(torch.ones(4, 3), toma_initial_step=3)
    f(torch.ones(4, 3), toma_dimension=-1)
    assert sizes == [
        ((2, 3), (1,), {"key": 2}),
        ((2, 3), (1,), {"key": 2}),
        ((3, 3), (), {}),
        ((1, 3), (), {}),
        ((4, 2), (), {}),
        ((4, 1), (), {}),
    ]


def test_a_maximum_is_where_the_search_begins_without_an_initial_size(only_16, sizes):
    assert adaptive.batch(maximum=64)(only_16)() == 16
    assert sizes == [64, 32, 16]


def test_random_numbers_of_a_failed_attempt_are_drawn_again_only_on_request():
    def draws(restore_rng):
        adaptive.reset()  # both functions have the same code, and so the same size
        seen = []

        @adaptive.batch(initial_batchsize=4, restore_rng=restore_rng)
        def f(batchsize):
            seen.append(torch.rand(1).item())
            if batchsize > 2:
                oom()

        f()
        return seen

    first, second = draws(restore_rng=True)
    assert first == second != torch.rand(1).item()
    first, second = draws(restore_rng=False)
    assert first != second


def test_random_numbers_of_generators_among_the_arguments_are_drawn_again_too():
    seen = []

    @adaptive.range(initial_step=4, restore_rng=True)
    def f(start, end, generator):
        seen.append(torch.rand(1, generator=generator).item())
        if end - start > 2:
            oom()

    generator = torch.Generator().manual_seed(0)
    f(0, 2, generator)
    seen.clear()
    f(0, 4, generator=generator)
    assert len(seen) == 3
    assert seen[0] == seen[1] != seen[2]


# --- results


def test_results_are_collected_in_their_order():
    @adaptive.range(initial_step=3, collect="list")
    def pieces(start, end):
        if end - start > 2:
            oom()
        return start, end

    assert pieces(1, 6) == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert pieces(1, 1) == []


def test_results_are_concatenated_along_the_dimension_that_was_split():
    @adaptive.chunked(initial_step=2, dimension=1, collect="cat")
    def parts(chunk, start, end):
        return {"doubled": 2 * chunk, "both": (chunk, [chunk + 1])}

    x = torch.arange(15.0).reshape(3, 5)
    result = parts(x)
    assert torch.equal(result["doubled"], 2 * x)
    assert torch.equal(result["both"][0], x)
    assert torch.equal(result["both"][1][0], x + 1)


def test_results_live_on_and_temporaries_do_not(nobody_searches):
    kept = []

    @adaptive.chunked(initial_step=4, collect="list")
    def f(chunk, start, end):
        kept.append(torch.ones(3))
        if len(chunk) > 2:
            oom()
        return chunk + 1

    results = f(torch.zeros(4))
    assert [result.sum().item() for result in results] == [2.0, 2.0]
    with pytest.raises(DisposedTensorError, match=r"while <DisposeScope 'attempt of "):
        kept[0].sum()
    assert kept[1].sum() == 3


def test_a_function_may_have_an_argument_that_is_called_tensor():
    @adaptive.chunked(collect="cat")
    def scaled(chunk, start, end, tensor):
        return chunk * tensor

    assert scaled(torch.ones(3), tensor=2).tolist() == [2, 2, 2]


def test_nothing_to_concatenate_is_an_error_that_says_what_to_do():
    f = adaptive.chunked(initial_step=2, collect="cat")(lambda chunk, start, end: chunk)
    with pytest.raises(AdaptiveUsageError, match=r'^collect="cat" has nothing to concatenate'):
        f(torch.ones(0))


def jagged(x):
    return torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, jagged])
def test_a_tensor_that_is_not_dense_is_refused_by_its_layout(make):
    f = adaptive.chunked(initial_step=2)(lambda chunk, start, end: None)
    with pytest.raises(
        AdaptiveUsageError, match=r"got \w+\[.*4\] .* of layout torch\._?\w+, and splits dense"
    ):
        f(make(torch.eye(4)))


# --- being a function


class Model:
    """A class whose methods adapt."""

    def __init__(self, name):
        self.name = name
        self.sizes = []

    @adaptive.batch(initial_batchsize=64, cache_type=GlobalBatchsizeCache)
    def run(self, batchsize, extra=None):
        """Run it."""
        self.sizes.append(batchsize)
        if batchsize > 16:
            oom()
        return self.name, batchsize, extra

    @adaptive.range(initial_step=4, collect="list")
    def pieces(self, start, end):
        return self.name, start, end

    @adaptive.chunked(initial_step=4, collect="list")
    def chunks(self, chunk, start, end):
        return self.name, len(chunk)

    @adaptive.batch(initial_batchsize=2)
    @classmethod
    def of_the_class(cls, batchsize):
        return cls.__name__, batchsize

    @adaptive.batch(initial_batchsize=2)
    @staticmethod
    def of_nothing(batchsize):
        return batchsize


@adaptive.batch(initial_batchsize=8)
def at_the_top(batchsize):
    return batchsize


def test_methods_get_their_instance_first():
    model = Model("a")
    assert model.run("x") == ("a", 16, "x")
    assert model.pieces(0, 6) == [("a", 0, 4), ("a", 4, 6)]
    assert model.chunks(torch.ones(5)) == [("a", 4), ("a", 1)]
    assert Model.of_the_class() == model.of_the_class() == ("Model", 2)
    assert Model.of_nothing() == model.of_nothing() == 2
    assert Model.run(model, "x") == ("a", 16, "x")
    assert Model.chunks(model, torch.ones(5)) == [("a", 4), ("a", 1)]


def passed_on(function):
    return lambda *args: function(*args)


class Decorated:
    """Methods with a decorator above or below the adaptive one."""

    @adaptive.range(initial_step=4, collect="list")
    @passed_on
    def wrapped(self, start, end):
        return self, start, end

    @torch.no_grad()
    @adaptive.batch(initial_batchsize=4)
    def batch(self, batchsize, more=0):
        return self, batchsize, more

    @property
    @adaptive.batch(initial_batchsize=4)
    def largest(self, batchsize):
        return self, batchsize

    @classmethod
    @adaptive.batch(initial_batchsize=4)
    def of_class(cls, batchsize):
        return cls, batchsize


class Inherits(Decorated):
    pass


def test_methods_get_their_instance_first_whatever_they_are_decorated_with():
    it = Inherits()
    assert it.wrapped(0, 4) == [(it, 0, 4)]
    assert it.batch() == (it, 4, 0)
    assert it.batch(7) == (it, 4, 7)
    assert Inherits.batch(it, more=7) == (it, 4, 7)
    assert it.largest == (it, 4)
    assert Inherits.of_class() == (Inherits, 4)


def test_instances_share_the_size_of_their_method():
    one, other = Model("one"), Model("other")
    one.run()
    other.run()
    assert (one.sizes, other.sizes) == ([64, 32, 16], [16])


def test_a_decorated_function_looks_like_the_one_it_wraps():
    assert Model.run.__name__ == "run"
    assert Model.run.__qualname__ == "Model.run"
    assert Model.run.__doc__ == "Run it."
    assert Model.run.__module__ == __name__
    assert Model("a").run.__func__ is Model.run
    assert inspect.isfunction(Model.run)


def test_decorated_functions_and_methods_are_pickled_and_copied_by_reference():
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top
    assert copy.deepcopy(at_the_top) is at_the_top
    bound = pickle.loads(pickle.dumps(Model("a").run))
    assert bound() == ("a", 16, None)


async def coroutine(batchsize):
    pass


def generator(batchsize):
    yield


@pytest.mark.parametrize(
    "call",
    [
        lambda: adaptive.batch(coroutine),
        lambda: adaptive.range(generator),
        lambda: explicit.batch(generator, 4),
        lambda: execute.batch(4)(coroutine),
    ],
)
def test_functions_that_can_be_suspended_are_refused(call):
    message = r"can be suspended: it would run out of memory after the call"
    with pytest.raises(AdaptiveUsageError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: adaptive.batch(5),
            r"^@tenure\.adaptive\.batch wants a function, and got 5\. For a size",
        ),
        (
            lambda: adaptive.batch(cache_type=int),
            r"^cache_type is <class 'int'>, which is no cache",
        ),
        (lambda: adaptive.batch(on_retry=3), r"^on_retry=3 can't be called\."),
        (lambda: adaptive.batch(on_retry="log"), r"^on_retry='log' can't be called\."),
        (lambda: adaptive.range(predict=True), r"^predict= is for batch\(\): "),
        (lambda: adaptive.chunked(predict=True), r"^predict= is for batch\(\): "),
        (lambda: adaptive.batch(minimum=0), r"^minimum=0 is not a size\."),
        (
            lambda: adaptive.batch(context=[1]),
            r"^context=\[1\] can't stand for a memory of sizes\.",
        ),
        (
            lambda: adaptive.range(collect="sum")(print),
            r"^collect='sum' is none of \"list\", \"cat\"",
        ),
        (lambda: adaptive.range(print)(0.0, 4), r"^print\(\) got the range 0\.0 to 4\. Its first"),
        (lambda: adaptive.range(print)(4), r"^print\(\) got the range 4 to None\. Its first two"),
        (lambda: adaptive.chunked(print)([1, 2]), r"a list to split.*adaptive\.range"),
        (lambda: adaptive.chunked(print)(rows=torch.ones(3)), r"a NoneType to split.*tensor of it"),
        (
            lambda: adaptive.chunked(print, dimension=2)(torch.ones(3)),
            r"^print\(\) can't split dimension 2 of a tensor that has 1\. Choose another",
        ),
        (
            lambda: adaptive.chunked(print)(torch.ones(())),
            r"^print\(\) can't split dimension 0 of a tensor that has 0\.",
        ),
        (
            lambda: adaptive.batch(print, initial_batchsize=8)(toma_initial_batchsize=0),
            r"^toma_initial_batchsize=0 is not a size\.",
        ),
    ],
)
def test_what_can_not_be_used_is_refused(call, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        call()
