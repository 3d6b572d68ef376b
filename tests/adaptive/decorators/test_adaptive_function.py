"""What decorated functions of all kinds have in common: looks, copies, and who calls them."""

import copy
import functools
import pickle

import pytest

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, execute

pytestmark = pytest.mark.usefixtures("forgetful")


# --- copies and pickles


def bare(batchsize, extra=None):
    return batchsize, extra


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


# --- who calls


def test_a_star_import_replaces_no_builtin():
    space = {}
    exec("from tenure.adaptive import *", space)
    assert not space.keys() & {"batch", "range", "chunked"}
    assert space["step"] is adaptive.step
    # and what pytest puts into modules that it rewrites
    public = {name for name in vars(adaptive) if not name.startswith(("_", "@"))}
    assert public - space.keys() == {"batch", "range", "chunked"}


def test_a_size_in_the_place_of_the_function_is_told_its_name():
    with pytest.raises(AdaptiveUsageError, match=r"write @tenure\.adaptive\.range\(initial_step=8"):
        adaptive.range(8)


@pytest.mark.parametrize(
    ("decorate", "option", "meant"),
    [
        (adaptive.batch, "starting_batch_size", "initial_batchsize"),
        (adaptive.batch, "max_batch_size", "maximum"),
        (adaptive.range, "initial_batchsize", "initial_step"),
        (adaptive.chunked, "chunk_size", "initial_step"),
        (adaptive.chunked, "contxt", "context"),
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
