"""Decorated functions: their arguments, their results, and what they are as functions."""

import copy
import functools
import inspect
import pickle
import re

import pytest
import torch

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, GlobalBatchsizeCache, execute, explicit, simple

from ..attempt.failures import oom

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


# --- results


def test_a_function_may_have_an_argument_that_is_called_tensor():
    @adaptive.chunked(collect="cat")
    def scaled(chunk, start, end, tensor):
        return chunk * tensor

    assert scaled(torch.ones(3), tensor=2).tolist() == [2, 2, 2]


# --- being a function


def passed_on(function):
    return lambda *args: function(*args)


class Model:
    """A class whose methods adapt, some with a decorator above or below the adaptive one."""

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

    @classmethod
    @adaptive.batch(initial_batchsize=4)
    def of_class(cls, batchsize):
        return cls.__name__, batchsize

    @adaptive.batch(initial_batchsize=2)
    @staticmethod
    def of_nothing(batchsize):
        return batchsize

    @adaptive.range(initial_step=4, collect="list")
    @passed_on
    def wrapped(self, start, end):
        return self.name, start, end

    @torch.no_grad()
    @adaptive.batch(initial_batchsize=4)
    def batch(self, batchsize, more=0):
        return self.name, batchsize, more

    @property
    @adaptive.batch(initial_batchsize=4)
    def largest(self, batchsize):
        return self.name, batchsize


class Inherits(Model):
    pass


@adaptive.batch(initial_batchsize=8)
def at_the_top(batchsize):
    return batchsize


@pytest.mark.parametrize("kind", [Model, Inherits])
def test_methods_get_their_instance_first_whatever_they_are_decorated_with(kind):
    model = kind("a")
    assert model.run("x") == kind.run(model, "x") == ("a", 16, "x")
    assert model.pieces(0, 6) == [("a", 0, 4), ("a", 4, 6)]
    assert model.chunks(torch.ones(5)) == [("a", 4), ("a", 1)]
    assert kind.chunks(model, torch.ones(5)) == [("a", 4), ("a", 1)]
    assert kind.of_the_class() == model.of_the_class() == (kind.__name__, 2)
    assert kind.of_class() == model.of_class() == (kind.__name__, 4)
    assert kind.of_nothing() == model.of_nothing() == 2
    assert model.wrapped(0, 4) == [("a", 0, 4)]
    assert model.batch() == ("a", 4, 0)
    assert model.batch(7) == kind.batch(model, more=7) == ("a", 4, 7)
    assert model.largest == ("a", 4)


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


def first_of(results):
    return results[0]


class Holder:
    """An object that decorates its own methods, and has decorated ones."""

    def __init__(self, name):
        self.name = name
        self.fit = adaptive.batch(initial_batchsize=8, maximum=32)(self._fit)
        self.plain = adaptive.batch(initial_batchsize=8)(self.plain)
        self.first = adaptive.range(initial_step=2, collect=first_of)(self._piece)
        self.all = adaptive.range(initial_step=2, collect="list")(self._piece)

    def _fit(self, batchsize, extra=None):
        return self.name, batchsize, extra

    def plain(self, batchsize):
        return self.name, batchsize

    def _piece(self, start, end):
        return self.name, start, end


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.fixture(params=[copy.deepcopy, pickled], ids=["copied", "pickled"])
def duplicate(request):
    return request.param


def test_a_copy_of_what_decorated_its_own_methods_has_them_decorated_and_bound_to_itself(duplicate):
    holder = duplicate(Holder("old"))
    holder.name = "new"
    assert holder.fit(3) == ("new", 8, 3)
    assert holder.fit() == ("new", 8, None)
    assert holder.plain() == ("new", 8)
    assert holder.first(0, 4) == ("new", 0, 2)
    assert holder.all(0, 4) == [("new", 0, 2), ("new", 2, 4)]


def test_a_star_import_replaces_no_builtin():
    space = {}
    exec("from tenure.adaptive import *", space)
    assert not space.keys() & {"batch", "range", "chunked"}
    assert space["step"] is adaptive.step
    # and what pytest puts into modules that it rewrites
    public = {name for name in vars(adaptive) if not name.startswith(("_", "@"))}
    assert public - space.keys() == {"batch", "range", "chunked"}


@pytest.mark.parametrize(
    ("decorate", "option", "meant"),
    [
        (adaptive.batch, "starting_batch_size", "initial_batchsize"),
        (adaptive.batch, "max_batch_size", "maximum"),
        (adaptive.range, "initial_batchsize", "initial_step"),
        (adaptive.chunked, "chunk_size", "initial_step"),
        (adaptive.chunked, "contxt", "context"),
        (functools.partial(adaptive.execute.range, 0, 4), "step", "initial_step"),
        (adaptive.batch, "verbose", None),
        (functools.partial(execute.batch, initial_batchsize=8), "zzz", None),
    ],
)
def test_an_argument_of_another_library_is_told_the_name_it_has_here_or_all(
    decorate, option, meant
):
    with pytest.raises(AdaptiveUsageError) as caught:
        decorate(**{option: 3})
    told, _, names = str(caught.value).partition(". ")
    assert told == f"{option!r} is no argument of this function"
    if meant is None:
        assert re.match("The options of all are cache_type, context, min.*on_retry", names)
    else:
        assert names == f"Did you mean {meant!r}?"


def test_a_batch_size_that_is_passed_all_the_same_is_said_to_come_from_tenure():
    @adaptive.batch(initial_batchsize=64)
    def train(batchsize, net):
        return len(net)

    message = r"train\(\) takes 2 positional arguments but 3 were given"
    with pytest.raises(TypeError, match=message) as caught:
        train(64, [])
    (note,) = caught.value.__notes__
    assert note.endswith(
        "train() gets its batch size from tenure, before what it is called with. Call it without "
        "one: leave 64 out."
    )
    with pytest.raises(TypeError) as caught:
        train("a", "b")
    assert not hasattr(caught.value, "__notes__")


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


def jagged(x):
    return torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)


NOT_DENSE = r"got \w+\[.*4\] .* of layout torch\._?\w+, and splits dense"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: adaptive.batch(5),
            r"^@tenure\.adaptive\.batch wants a function, and got 5\. For a size",
        ),
        (lambda: adaptive.range(8), r"write @tenure\.adaptive\.range\(initial_step=8"),
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
        (lambda: adaptive.chunked(print)(torch.eye(4).to_sparse()), NOT_DENSE),
        (lambda: adaptive.chunked(print)(jagged(torch.eye(4))), NOT_DENSE),
        (lambda: simple.range(print, 0, 10, 0), r"^initial_step=0 is not a size"),
        (lambda: simple.range(print, 0, 10, 2.5), r"^initial_step=2\.5 is not a size"),
        (lambda: simple.range(print, 0, 10, "64"), r"^initial_step='64' is not a size"),
        (lambda: adaptive.batch(print)(), r"print\(\) has no batch size to begin with\. "),
        (
            lambda: adaptive.batch(print, initial_batchsize=8)(toma_initial_batchsize=0),
            r"^toma_initial_batchsize=0 is not a size\.",
        ),
    ],
)
def test_what_can_not_be_used_is_refused(call, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        call()


def test_a_chunk_that_was_written_in_place_is_not_tried_again():
    rows = torch.ones(64)

    @adaptive.chunked(collect="cat")
    def halved(part, start, end, most):
        part.div_(2)
        if len(part) > most:
            raise oom()
        return part.sum()[None]

    assert halved(rows, 64) == 32
    with pytest.raises(AdaptiveUsageError, match="has written into its chunk, the rows from 0 on"):
        halved(rows, 16)
