"""Decorated functions: their arguments, their results, and what they are as functions."""

import copy
import functools
import inspect
import os
import pickle
from collections import OrderedDict, defaultdict

import pytest
import torch

from tenure import DisposedTensorError, adaptive, owner_of
from tenure.adaptive import (
    AdaptiveUsageError,
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    OutOfRetriesError,
    execute,
    explicit,
    memory_budget,
    simple,
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


def test_a_context_given_in_the_call_or_the_decorator_is_shared(only_16, sizes):
    one = adaptive.batch(initial_batchsize=64, context="shared")(only_16)
    other = adaptive.batch(initial_batchsize=64)(only_16)
    one()
    other(toma_context="shared")
    explicit.batch(only_16, 64, toma_context="shared")
    assert sizes == [64, 32, 16, 16, 16]


def test_a_cache_type_given_in_the_call(only_16, sizes):
    f = adaptive.batch(initial_batchsize=64, cache_type=NoBatchsizeCache)(only_16)
    f()
    f(toma_cache_type=GlobalBatchsizeCache)
    f(toma_cache_type=GlobalBatchsizeCache)
    assert sizes == [64, 32, 16, 64, 32, 16, 16]


def test_limits_of_sizes_are_kept(sizes):
    @adaptive.range(initial_step=100, minimum=8, align=8)
    def f(start, end):
        sizes.append(end - start)
        if end - start > 30:
            oom()

    f(0, 64)
    assert sizes == [64, 32, 16, 16, 16, 16]


def test_giving_up_names_the_argument_that_allows_no_less():
    @adaptive.batch(initial_batchsize=16, align=8)
    def f(batchsize):
        oom()

    with pytest.raises(OutOfRetriesError, match=r"Allow less than 8 with align=, or page the"):
        f()


def test_a_size_below_the_minimum_is_never_tried(sizes):
    @adaptive.batch(initial_batchsize=64, minimum=20)
    def f(batchsize):
        sizes.append(batchsize)
        oom()

    with pytest.raises(OutOfRetriesError, match=r"Allow less than 20 with minimum="):
        f()
    assert sizes == [64, 32, 20]


def test_a_maximum_is_where_the_search_begins_without_an_initial_size(only_16, sizes):
    assert adaptive.batch(maximum=64)(only_16)() == 16
    assert sizes == [64, 32, 16]


def test_each_retry_is_told(sizes):
    @adaptive.batch(initial_batchsize=64, on_retry=lambda event: sizes.append(str(event)))
    def fit(batchsize):
        if batchsize > 40:
            oom()

    fit()
    assert sizes == [
        "'test_each_retry_is_told.<locals>.fit' ran out of cuda memory at batch size 64 "
        "(needed 2.0 GiB more); goes on with 32."
    ]


def test_each_growth_is_told_to_the_same_function(sizes):
    @adaptive.batch(initial_batchsize=2, maximum=8, on_retry=lambda event: sizes.append(str(event)))
    def fit(batchsize):
        pass

    for _ in range(20):
        fit()
    name = "'test_each_growth_is_told_to_the_same_function.<locals>.fit'"
    assert sizes == [
        f"{name} goes on with batch size 4, after 2.",
        f"{name} goes on with batch size 8, after 4.",
    ]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_caller_and_a_compiled_callee_work():
    @adaptive.chunked(initial_step=4, collect="cat")
    def outer(chunk, start, end):
        if len(chunk) > 2:
            oom()
        return chunk + 1

    assert torch.compile(outer, backend="eager")(torch.zeros(5)).tolist() == [1.0] * 5
    inner = torch.compile(lambda chunk, start, end: chunk * 2, backend="eager")
    doubled = adaptive.chunked(initial_step=2, collect="cat")(inner)
    assert doubled(torch.ones(5)).tolist() == [2.0] * 5


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
    assert first == second
    first, second = draws(restore_rng=False)
    assert first != second


@pytest.mark.parametrize("named", [False, True])
def test_random_numbers_of_generators_among_the_arguments_are_drawn_again_too(named):
    seen = []

    @adaptive.range(initial_step=4, restore_rng=True)
    def f(start, end, generator):
        seen.append(torch.rand(1, generator=generator).item())
        if end - start > 2:
            oom()

    generator = torch.Generator().manual_seed(0)
    f(0, 2, generator=generator) if named else f(0, 2, generator)
    seen.clear()
    f(0, 4, generator=generator) if named else f(0, 4, generator)
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


def test_concatenated_dicts_keep_their_class_and_results_stay_as_they_were():
    results = []

    def parts(make):
        @adaptive.chunked(initial_step=2, collect="cat")
        def f(chunk, start, end):
            results.append(make(b=chunk, a=chunk + 1))
            return results[-1]

        return f(torch.arange(4.0))

    ordered = parts(OrderedDict)
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]
    assert ordered["a"].tolist() == [1, 2, 3, 4]
    assert parts(functools.partial(defaultdict, list))["new"] == []
    assert [len(each["a"]) for each in results] == [2] * 4


@pytest.mark.parametrize("initial", [1, 4])
def test_results_without_a_dimension_are_refused_by_name(initial):
    f = adaptive.chunked(initial_step=initial, collect="cat")(lambda chunk, start, end: chunk.sum())
    with pytest.raises(AdaptiveUsageError, match=r"tensors that have no dimension\. Return them"):
        f(torch.ones(4))


def test_other_errors_of_concatenation_pass_unchanged():
    class Alone(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.cat:
                raise RuntimeError("nothing joins these")
            return super().__torch_function__(func, types, args, kwargs)

    f = adaptive.chunked(initial_step=1, collect="cat")(
        lambda chunk, start, end: torch.ones(1).as_subclass(Alone)
    )
    with pytest.raises(RuntimeError, match="nothing joins these"):
        f(torch.ones(2))


def test_results_are_given_to_a_function():
    @adaptive.chunked(initial_step=2, collect=sum)
    def total(chunk, start, end):
        return chunk.sum().item()

    assert total(torch.ones(7)) == 7.0


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


def test_no_scope_owns_a_chunk_also_after_a_failure():
    owners = []

    @adaptive.chunked(initial_step=2)
    def look(chunk, start, end):
        owners.append(owner_of(chunk))
        if len(owners) == 1:
            oom()

    look(torch.ones(2))
    assert owners == [None, None, None]


def test_nothing_to_concatenate_is_an_error_that_says_what_to_do():
    f = adaptive.chunked(initial_step=2, collect="cat")(lambda chunk, start, end: chunk)
    with pytest.raises(AdaptiveUsageError, match=r'^collect="cat" has nothing to concatenate'):
        f(torch.ones(0))


@pytest.mark.parametrize(
    ("first", "other", "shown"),
    [
        (
            {"a": torch.ones(1)},
            {"a": torch.ones(1), "b": torch.ones(1)},
            r"a dict of 'a' and a dict of 'a', 'b'\.",
        ),
        (
            (torch.ones(1),) * 2,
            (torch.ones(1),),
            r"a tuple or list of 2 and a tuple or list of 1\.",
        ),
        (torch.ones(1), None, r"a tensor and a NoneType\."),
    ],
)
def test_results_that_differ_are_not_concatenated_in_part(first, other, shown):
    f = adaptive.chunked(initial_step=1, collect="cat")(
        lambda c, start, end: other if start else first
    )
    with pytest.raises(AdaptiveUsageError, match=f"can't concatenate {shown}"):
        f(torch.arange(2))


def jagged(x):
    return torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)


def quantized(x):
    return torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn, jagged, quantized]
)
def test_a_tensor_that_is_not_dense_is_refused_by_its_layout(make):
    f = adaptive.chunked(initial_step=2)(lambda chunk, start, end: None)
    with pytest.raises(
        AdaptiveUsageError, match=r"got \w+\[.*4\] .* of layout torch\._?\w+, and splits dense"
    ):
        f(make(torch.eye(4)))


def test_results_that_can_not_be_concatenated_are_named():
    f = adaptive.chunked(initial_step=2, collect="cat")(lambda chunk, start, end: "text")
    with pytest.raises(AdaptiveUsageError, match=r"can't concatenate a result of type str\."):
        f(torch.ones(4))


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
    def without_instance(batchsize, extra):
        return batchsize, extra

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


def passed_on(function):
    return lambda *args: function(*args)


class Unusual:
    """Methods whose first parameter is not called self."""

    @adaptive.batch(initial_batchsize=2)
    def called_this(this, batchsize):
        return this, batchsize

    @adaptive.range(initial_step=4, collect="list")
    @passed_on
    def wrapped(self, start, end):
        return self, start, end

    @adaptive.chunked(initial_step=4, collect="list")
    @torch.no_grad()
    def without_grad(self, chunk, start, end):
        return self, len(chunk)


class InheritsUnusual(Unusual):
    pass


@pytest.mark.parametrize("kind", [Unusual, InheritsUnusual])
def test_methods_get_their_instance_first_whatever_they_call_it(kind):
    it = kind()
    assert it.called_this() == (it, 2)
    assert it.wrapped(0, 4) == [(it, 0, 4)]
    assert it.without_grad(torch.ones(4)) == kind.without_grad(it, torch.ones(4)) == [(it, 4)]


def test_methods_get_their_instance_first():
    model = Model("a")
    assert model.run("x") == ("a", 16, "x")
    assert model.pieces(0, 6) == [("a", 0, 4), ("a", 4, 6)]
    assert model.chunks(torch.ones(5)) == [("a", 4), ("a", 1)]
    assert Model.of_the_class() == model.of_the_class() == ("Model", 2)
    assert Model.of_nothing() == model.of_nothing() == 2


def test_methods_can_be_called_through_their_class():
    model = Model("a")
    assert Model.run(model, "x") == ("a", 16, "x")
    assert Model.pieces(model, 0, 6) == [("a", 0, 4), ("a", 4, 6)]
    assert Model.chunks(model, torch.ones(5)) == [("a", 4), ("a", 1)]
    assert Model.without_instance("x") == (2, "x")
    assert pickle.loads(pickle.dumps(Model.run))(model) == ("a", 16, None)


def test_overridden_methods_call_the_one_above():
    class Special(Model):
        def run(self, extra=None):
            return "special", super().run(extra)

    assert Special("b").run(3) == ("special", ("b", 16, 3))


def test_a_method_that_was_taken_from_another_class_binds_to_instances():
    class Other(Model):
        work = Model.run
        of_model = Model.of_the_class

    other = Other("b")
    assert other.work("x") == Other.work(other, "x") == ("b", 16, "x")
    assert other.of_model() == ("Model", 2)
    assert Other.work.__name__ == "run"


def test_a_method_looked_up_in_a_class_is_the_function_itself():
    class Special(Model):
        pass

    Special.later = adaptive.batch(initial_batchsize=2)(lambda it, batchsize: (it, batchsize))
    special = Special("b")
    assert Model.run is vars(Model)["run"] is Special.run
    assert Special.run(Model("a"), "x") == ("a", 16, "x")
    assert Special.later(special) == special.later() == (special, 2)


class Decorated:
    """Methods with a decorator above the adaptive one."""

    @torch.no_grad()
    @adaptive.batch(initial_batchsize=4)
    def batch(self, batchsize, more=0):
        return self, batchsize, more

    @memory_budget("1MiB")
    @adaptive.range(initial_step=4, collect="list")
    def range(self, start, end, more=0):
        return self, start, end, more

    @torch.inference_mode()
    @adaptive.chunked(initial_step=4, collect="list")
    def chunked(self, chunk, start, end, more=0):
        return self, chunk.tolist(), more

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


@pytest.mark.parametrize("kind", [Decorated, Inherits])
def test_methods_get_their_instance_first_whatever_stands_above(kind):
    it = kind()
    assert it.batch() == (it, 4, 0)
    assert it.batch(7) == (it, 4, 7)
    assert kind.batch(it, more=7) == (it, 4, 7)
    assert it.range(0, 6) == [(it, 0, 4, 0), (it, 4, 6, 0)]
    assert it.range(0, 2, 7) == [(it, 0, 2, 7)]
    assert it.chunked(torch.arange(5), 7) == [(it, [0, 1, 2, 3], 7), (it, [4], 7)]
    assert it.largest == (it, 4)
    assert kind.of_class() == (kind, 4)


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


async def async_generator(batchsize):
    yield


class Suspendable:
    def __call__(self, batchsize):
        yield


@pytest.mark.parametrize("function", [coroutine, generator, async_generator, Suspendable()])
def test_functions_that_can_be_suspended_are_refused(function):
    message = r"can be suspended: it would run out of memory after the call"
    for decorate in (adaptive.batch, adaptive.range, adaptive.chunked):
        with pytest.raises(AdaptiveUsageError, match=message):
            decorate(function)
    for call in (
        lambda: explicit.batch(function, 4),
        lambda: simple.batch(function, 4),
        lambda: execute.batch(4)(function),
    ):
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
        (lambda: adaptive.chunked(print)([1, 2]), r"a list to split.*adaptive\.range"),
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


def test_a_tensor_of_a_failed_attempt_says_where_the_call_was_and_nothing_of_tenures_files(
    nobody_searches,
):
    kept = []

    @adaptive.batch(initial_batchsize=2)
    def work(size):
        if size == 2:
            kept.append(torch.ones(1))
            oom()

    work()
    with pytest.raises(DisposedTensorError, match=r"attempt of .*work.* at .* 2'") as raised:
        kept[0].exp()
    here = f"test_functions.py:{inspect.currentframe().f_lineno - 3}"
    assert f"(opened at tests{os.sep}adaptive{os.sep}decorators{os.sep}{here})" in str(raised.value)
    assert "_run.py" not in str(raised.value)
