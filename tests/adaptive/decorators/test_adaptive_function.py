"""What decorated functions of all kinds have in common: looks, copies, and who calls them."""

import _thread
import copy
import functools
import pickle
import threading

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, GlobalBatchsizeCache, execute, explicit

from ..attempt.failures import oom

pytestmark = pytest.mark.usefixtures("forgetful")


class Task:
    """A callable object whose attributes are called like those of what wraps it."""

    def __init__(self):
        self.done = []
        self.note = "of the task"
        self.__wrapped__ = print
        self.func = self.args = self.keywords = None

    def __call__(self, start, end):
        self.done.append((start, end))


def test_attributes_of_what_is_wrapped_take_the_place_of_no_method():
    task = Task()
    f = adaptive.range(initial_step=4)(task)
    f(0, 10)
    assert task.done == [(0, 4), (4, 8), (8, 10)]
    assert f.note == "of the task"
    assert f.__wrapped__ is task


# --- copies and pickles


def bare(batchsize, extra=None):
    return batchsize, extra


def first_of(results):
    return results[0]


decorated_here = adaptive.batch(initial_batchsize=8)(bare)


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

    under_another_name = adaptive.batch(initial_batchsize=8)(_fit)

    @adaptive.batch(initial_batchsize=4)
    @staticmethod
    def of_nothing(batchsize):
        return batchsize

    @adaptive.batch(initial_batchsize=4)
    @classmethod
    def of_the_class(cls, batchsize):
        return cls, batchsize

    @adaptive.batch(initial_batchsize=4)
    def method(self, batchsize):
        return batchsize

    @staticmethod
    @adaptive.batch(initial_batchsize=4)
    def of_nothing_either(batchsize):
        return batchsize


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
    assert holder.under_another_name(3) == ("new", 8, 3)


def test_a_copy_of_a_decorated_method_alone_is_decorated(duplicate):
    assert duplicate(Holder("a").fit)(3) == ("a", 8, 3)


def test_what_has_another_name_than_its_function_is_copied_and_is_not_pickled():
    holder = Holder("a")
    assert copy.deepcopy(holder.under_another_name)(3) == ("a", 8, 3)
    assert copy.deepcopy(decorated_here)(3) == (8, 3)
    for function in (decorated_here, Holder.under_another_name, Trainer.fit):
        with pytest.raises(pickle.PicklingError, match="not the same object"):
            pickle.dumps(function)
    with pytest.raises(AttributeError, match=r"no attribute '_fit \(decorated\)'"):
        pickled(holder.under_another_name)


def test_functions_of_a_class_are_copied_by_reference(duplicate):
    for of in (Holder, Holder("a")):
        assert duplicate(of.of_nothing)() == 4
        assert duplicate(of.of_the_class)() == (Holder, 4)
    assert duplicate(Holder.of_nothing_either) is Holder.of_nothing_either
    assert duplicate(vars(Holder)["method"]) is vars(Holder)["method"]


@pytest.mark.parametrize("function", [functools.partial(bare, extra=3), nn.Linear(1, 8)])
def test_decorated_objects_and_what_holds_them_are_copied(function, duplicate):
    holder = nn.Module()
    holder.fit = adaptive.batch(initial_batchsize=8, minimum=2)(function)
    copied = duplicate(holder).fit
    assert copied is not holder.fit
    assert type(copied) is type(holder.fit)
    assert copied.args[0].limits == holder.fit.args[0].limits
    assert duplicate(holder.fit).__wrapped__ is not function
    assert copied.__wrapped__ is copied.args[1]


def test_a_copy_shares_the_sizes_of_the_original(only_16, sizes):
    f = adaptive.batch(initial_batchsize=64, cache_type=GlobalBatchsizeCache)(
        functools.partial(only_16)
    )
    f()
    assert copy.deepcopy(f)() == copy.copy(f)() == 16
    assert sizes == [64, 32, 16, 16, 16]


def test_a_function_without_a_place_is_copied_and_pickled_as_functions_are():
    f = adaptive.batch(initial_batchsize=8)(lambda batchsize: batchsize)
    assert copy.deepcopy(f) is copy.copy(f) is f
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(f)


# --- who calls


@pytest.mark.parametrize(
    "called_with",
    [
        lambda work: (adaptive.batch(initial_batchsize=4)(work),),
        lambda work: (adaptive.range(initial_step=4)(work), 0, 4),
        lambda work: (adaptive.chunked(initial_step=4)(work), torch.ones(4)),
        lambda work: (execute.batch(4), work),
        lambda work: (execute.range(0, 4, 4), work),
        lambda work: (execute.chunked(torch.ones(4), 4), work),
        lambda work: (explicit.batch, work, 4),
        lambda work: (explicit.range, work, 0, 4, 4),
        lambda work: (explicit.chunked, work, torch.ones(4), 4),
        lambda work: (adaptive.step, work, torch.ones(4, requires_grad=True)),
    ],
)
def test_calls_that_come_from_no_python_frame_are_retried_too(called_with):
    done = threading.Event()
    calls = []

    def work(*args):
        calls.append(args)
        if len(calls) == 1:
            oom()
        done.set()
        return args[0].mean() if isinstance(args[0], torch.Tensor) else None

    call, *args = called_with(work)
    _thread.start_new_thread(call, tuple(args))  # a Thread would call from Python
    assert done.wait(20)


def test_methods_called_from_no_python_frame_through_their_class_work():
    done = threading.Event()

    class Model:
        @adaptive.batch(initial_batchsize=4)
        def run(self, batchsize):
            done.set()

    _thread.start_new_thread(Model.run, (Model(),))
    assert done.wait(20)


def _fit(self, batchsize):
    return batchsize


class Trainer:
    """Has a method under another name than its function's."""

    fit = adaptive.batch(initial_batchsize=4)(_fit)


def test_a_star_import_replaces_no_builtin():
    space = {}
    exec("from tenure.adaptive import *", space)
    assert not space.keys() & {"batch", "range", "chunked"}
    assert space["step"] is adaptive.step
    # and what pytest puts into modules that it rewrites
    public = {name for name in vars(adaptive) if not name.startswith(("_", "@"))}
    assert public - space.keys() == {"batch", "range", "chunked"}


@pytest.mark.parametrize(
    ("decorate", "call", "initial"),
    [
        (adaptive.batch, "@tenure.adaptive.batch(initial_batchsize=64)", 64),
        (adaptive.range, "@tenure.adaptive.range(initial_step=8)", 8),
        (adaptive.chunked, "@tenure.adaptive.chunked(initial_step=8)", 8),
    ],
)
def test_a_size_in_the_place_of_the_function_is_told_its_name(decorate, call, initial):
    with pytest.raises(AdaptiveUsageError) as caught:
        decorate(initial)
    assert str(caught.value).endswith(f"For a size to begin with, write {call}.")


@pytest.mark.parametrize(
    ("decorate", "option", "meant"),
    [
        (adaptive.batch, "starting_batch_size", "initial_batchsize"),
        (adaptive.batch, "batch_size", "initial_batchsize"),
        (adaptive.batch, "minimun", "minimum"),
        (adaptive.range, "minimun", "minimum"),
        (adaptive.chunked, "minimun", "minimum"),
        (adaptive.batch, "max_batch_size", "maximum"),
        (adaptive.range, "step", "initial_step"),
        (adaptive.range, "initial_batchsize", "initial_step"),
        (adaptive.chunked, "chunk_size", "initial_step"),
        (adaptive.chunked, "min_step", "minimum"),
        (adaptive.chunked, "contxt", "context"),
        (functools.partial(adaptive.execute.batch, 4), "batchsize", "initial_batchsize"),
        (functools.partial(adaptive.execute.range, 0, 4), "step", "initial_step"),
    ],
)
def test_an_argument_of_another_library_is_told_the_name_it_has_here(decorate, option, meant):
    with pytest.raises(AdaptiveUsageError) as caught:
        decorate(**{option: 3})
    assert str(caught.value) == (
        f"{option!r} is no argument of this function. Did you mean {meant!r}?"
    )


def test_an_argument_that_nobody_meant_gets_the_list():
    message = r"^'{}' is no argument .* The options of all are cache_type, context, min.*on_retry"
    with pytest.raises(AdaptiveUsageError, match=message.format("verbose")):
        adaptive.batch(verbose=True)
    with pytest.raises(AdaptiveUsageError, match=message.format("zzz")):
        execute.batch(initial_batchsize=8, zzz=1)
    with pytest.raises(AdaptiveUsageError, match=message.format("cpu_fallback")):
        adaptive.chunked(cpu_fallback=True)
    with pytest.raises(AdaptiveUsageError, match=message.format("progress")):
        adaptive.range(progress=True)
    with pytest.raises(AdaptiveUsageError, match=message.format("group")):
        adaptive.batch(group=None)
    with pytest.raises(AdaptiveUsageError, match=message.format("reduce")):
        adaptive.batch(reduce=lambda size, info: size - 1)


def test_a_batch_size_that_is_passed_all_the_same_is_said_to_come_from_tenure():
    @adaptive.batch(initial_batchsize=64)
    def train(batchsize, net):
        return len(net)

    message = r"train\(\) takes 2 positional arguments but 3 were given"
    with pytest.raises(TypeError, match=message) as caught:
        train(64, [])
    assert caught.value.__notes__ == [
        "test_a_batch_size_that_is_passed_all_the_same_is_said_to_come_from_tenure.<locals>.train()"
        " gets its batch size from tenure, before what it is called with. Call it without one: "
        "leave 64 out."
    ]


@pytest.mark.parametrize("args", [(), ("a", "b"), (1,), (1, 2, 3)])
def test_another_type_error_is_left_as_it_is(args):
    @adaptive.batch(initial_batchsize=64)
    def train(batchsize, net):
        return len(net)

    with pytest.raises(TypeError) as caught:
        train(*args)
    assert not hasattr(caught.value, "__notes__")
