"""Who holds a tensor, in the public words: a list of names, and a balance that adds up."""

import ctypes
import functools
import gc
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

from tenure import NewDisposeScope
from tenure.profiler import HolderList, ProfilerUsageError, holders

CACHE = {}
HERE = __name__


class Box:
    """Anything with attributes."""


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


def test_it_is_a_list_of_strings():
    t = torch.ones(3)
    found = holders(t)
    assert isinstance(found, list)
    assert found == ["test_it_is_a_list_of_strings.<locals>.t"]


def keep_in_a_global(t):
    CACHE["k"] = t
    return f"{HERE}.CACHE['k']"


def keep_in_an_attribute(t):
    CACHE["box"] = Box()
    CACHE["box"].x = t
    return f"{HERE}.CACHE['box'].x"


def keep_in_a_closure(t):
    CACHE["f"] = lambda: t
    return f"closure of keep_in_a_closure.<locals>.<lambda>: t, held by {HERE}.CACHE['f']"


def keep_in_a_default(t):
    CACHE["f"] = lambda x=t: x
    return f"default of keep_in_a_default.<locals>.<lambda>: x, held by {HERE}.CACHE['f']"


def keep_in_a_partial(t):
    CACHE["f"] = functools.partial(print, t)
    return f"partial of print: args[0], held by {HERE}.CACHE['f']"


def keep_in_a_generator(t):
    def generate(u):
        yield u

    CACHE["g"] = generate(t)
    next(CACHE["g"])
    name = "keep_in_a_generator.<locals>.generate"
    return f"generator {name}: local u, held by {HERE}.CACHE['g']"


def keep_in_a_traceback(t):
    def fail(u):
        raise ValueError

    try:
        fail(t)
    except ValueError as error:
        CACHE["e"] = error.with_traceback(error.__traceback__.tb_next)
    name = "keep_in_a_traceback.<locals>.fail"
    return f"traceback of ValueError in {name}(): local u, held by {HERE}.CACHE['e']"


def keep_in_a_view(t):
    CACHE["view"] = t[:1]
    return f"a view in {HERE}.CACHE['view']"


def keep_in_an_array(t):
    CACHE["array"] = np.asarray(t)
    return f"numpy array {HERE}.CACHE['array']"


def keep_in_a_graph(t):
    weight = torch.ones(3, requires_grad=True)
    CACHE["loss"] = (weight * t).sum()
    return f"MulBackward0 (saved other) in the graph of {HERE}.CACHE['loss']"


KEEPERS = [value for name, value in list(globals().items()) if name.startswith("keep_in")]


@pytest.mark.parametrize("keep", KEEPERS, ids=lambda keep: keep.__name__)
def test_every_kind_of_holder_is_named_and_the_balance_is_that_of_the_interpreter(request, keep):
    if keep is keep_in_an_array:
        request.getfixturevalue("whole_heap")  # to an array of NumPy the way leads through the heap
    t = torch.ones(3)
    name = keep(t)
    gc.collect()
    found = holders(t)
    assert name in found
    # the variable is one reference, and up to Python 3.13 the argument of getrefcount another one
    alone = torch.ones(1)
    assert found.n_references == sys.getrefcount(t) - sys.getrefcount(alone) + 1
    assert found.n_unexplained == 0


def test_a_parameter_makes_up_for_no_other_holder():
    def look(u):
        keep_in_a_default(u)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(u))
        found = holders(u)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(u))
        return found

    t = torch.ones(3)
    found = look(t)
    name = "test_a_parameter_makes_up_for_no_other_holder.<locals>"
    assert {f"{name}.t", f"{name}.look.<locals>.u", keep_in_a_default(t)} <= set(found)
    assert (found.n_references, found.n_unexplained) == (4, 1)


def test_what_callers_keep_where_torch_compile_evaluates_the_frames_is_no_reference():
    def look(t, *more):
        return holders(t), holders(more[0])

    def call():
        t, other = torch.ones(3), torch.ones(3)
        return [(list(found), found.n_references) for found in look(t, other)]

    assert torch._dynamo.run(call)() == call()


def test_what_a_module_keeps_where_torch_compile_evaluates_the_frames_is_no_reference():
    code = compile("kept = [ones(3)]\nfound = holders(kept[0])", "module", "exec")
    names = {"holders": holders, "ones": torch.ones}
    torch._dynamo.run(exec)(code, names)
    assert (names["found"].n_references, names["found"].n_unexplained) == (1, 0)


def test_a_variable_of_another_thread_is_a_reference():
    t, ready, done = torch.ones(3), threading.Event(), threading.Event()

    def work(u):
        ready.set()
        done.wait()

    thread = threading.Thread(target=work, args=(t,), name="worker-7")
    thread.start()
    ready.wait()
    found = holders(t)
    done.set()
    thread.join()
    assert any(name.startswith("thread worker-7: ") for name in found)
    assert found.n_references >= 2


def test_a_reference_of_an_extension_is_counted_as_unexplained():
    t = torch.ones(3)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(t))
    try:
        found = holders(t)
        assert (found.n_references, found.n_unexplained) == (2, 1)
        assert found[-1].startswith("1 reference without a name")
        assert "2 references, 1 explained, 1 unexplained" in str(found)
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(t))


def test_asking_twice_gives_the_same_answer():
    t = torch.ones(3, requires_grad=True)
    CACHE["loss"] = t.exp().sum()
    first = holders(t)
    assert holders(t) == first
    assert (holders(t).n_references, holders(t).n_unexplained) == (first.n_references, 0)


def test_printed_it_begins_with_the_balance():
    t = torch.ones(3)
    CACHE["k"] = t
    name = "test_printed_it_begins_with_the_balance.<locals>.t"
    assert str(holders(t)) == (
        "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:\n"
        f"  {name}\n"
        f"  {HERE}.CACHE['k']"
    )


def test_the_site_of_a_scope_is_told():
    with NewDisposeScope("step", capture="site"):
        t = torch.ones(3)
        assert ", created at " in holders(t).summary()


def test_it_survives_a_pickle():
    found = HolderList(["a"], n_references=2, n_unexplained=1, tensor="x")
    again = pickle.loads(pickle.dumps(found))
    assert (again, str(again)) == (found, str(found))


def test_what_is_no_tensor_is_refused():
    with pytest.raises(
        ProfilerUsageError, match=r"wants a tensor or a module, and got list\. Pass the"
    ):
        holders([torch.ones(3)])


def test_a_disposed_tensor_has_holders():
    with NewDisposeScope("step"):
        t = torch.ones(3)
        CACHE["late"] = t
    found = holders(t)
    assert found == [
        "test_a_disposed_tensor_has_holders.<locals>.t",
        f"{HERE}.CACHE['late']",
    ]
    assert found.summary().startswith("<DisposedTensor float32[3] on cpu, 12 B, disposed when")
    assert found.summary().endswith(">: 2 references, 2 explained, 0 unexplained")


class Trainer:
    """Has a model, as trainers do."""

    def __init__(self, model):
        self.model = model

    def step(self):
        return holders(self.model)


def test_a_module_is_held_by_what_has_it():
    trainer = Trainer(torch.nn.Linear(2, 2))
    CACHE["best"] = [trainer.model]
    CACHE["forward"] = trainer.model.forward
    assert set(trainer.step()) == {
        "Trainer.model",
        f"{HERE}.CACHE['best'][0]",
        f"Linear, held by the bound method {HERE}.CACHE['forward']",
    }


def test_a_module_is_told_with_what_it_weighs_and_its_balance():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    (shown,) = str(holders(model)).splitlines()[1:]
    assert shown.endswith("<locals>.model")
    assert holders(model).summary() == (
        "Sequential with 2 tensors, 24 B: 1 reference, 1 explained, 0 unexplained"
    )


def test_a_child_is_held_by_its_parent_and_by_its_name_there():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    (name,) = holders(model[0])
    assert name.startswith("Sequential[0], held by ")


def test_what_a_user_changes_in_the_list_shows():
    t = torch.ones(3)
    CACHE["k"] = t
    found = holders(t)
    found.append("a guess")
    found.remove(f"{HERE}.CACHE['k']")
    assert "a guess" in str(found)
    assert "a guess" in found._repr_html_()
    assert CACHE["k"] is t


@pytest.mark.usefixtures("whole_heap")
def test_what_a_field_of_a_structured_array_holds_is_a_reference_without_a_name():
    t = torch.ones(3)
    rows = np.empty(2, [("step", int), ("loss", object)])
    rows["loss"][1] = t
    found = holders(t)
    assert found.n_unexplained == 1
    assert found[-1].startswith("1 reference without a name")
    assert rows["loss"][1] is t
