"""Who holds a tensor, in the public words: a list of names, and a balance that adds up."""

import ctypes
import pickle

import pytest
import torch

from tenure import NewDisposeScope
from tenure.profiler import HolderList, ProfilerUsageError, holders

CACHE = {}
HERE = __name__


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


K = f"{HERE}.CACHE['k']"


def test_a_parameter_makes_up_for_no_other_holder():
    def look(u):
        CACHE["k"] = lambda x=u: x
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(u))
        found = holders(u)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(u))
        return found

    t = torch.ones(3)
    found = look(t)
    name = "test_a_parameter_makes_up_for_no_other_holder.<locals>"
    default = f"default of {name}.look.<locals>.<lambda>: x, held by {K}"
    assert {f"{name}.t", f"{name}.look.<locals>.u", default} <= set(found)
    assert (found.n_references, found.n_unexplained) == (4, 1)
    assert found[-1].startswith("1 reference without a name")


def test_what_is_kept_where_torch_compile_evaluates_the_frames_is_no_reference():
    def look(t, *more):
        return holders(t), holders(more[0])

    def call():
        t, other = torch.ones(3), torch.ones(3)
        return [(list(found), found.n_references) for found in look(t, other)]

    assert torch._dynamo.run(call)() == call()
    code = compile("kept = [ones(3)]\nfound = holders(kept[0])", "module", "exec")
    names = {"holders": holders, "ones": torch.ones}
    torch._dynamo.run(exec)(code, names)
    assert (names["found"].n_references, names["found"].n_unexplained) == (1, 0)


def test_printed_it_begins_with_the_balance():
    t = torch.ones(3)
    CACHE["k"] = t
    found = holders(t)
    assert isinstance(found, list)
    assert str(found) == (
        "float32[3] on cpu, 12 B: 2 references, 2 explained, 0 unexplained:\n"
        "  test_printed_it_begins_with_the_balance.<locals>.t\n"
        f"  {K}"
    )
    assert holders(t) == found
    found.append("a guess")
    found.remove(K)
    assert str(found).endswith("\n  a guess")
    again = pickle.loads(pickle.dumps(found))
    assert (again, str(again)) == (found, str(found))
    assert isinstance(again, HolderList)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(
        ProfilerUsageError, match=r"wants a tensor or a module, and got list\. Pass the"
    ):
        holders([torch.ones(3)])


def test_a_disposed_tensor_has_holders_and_the_site_of_a_scope_is_told():
    with NewDisposeScope("step", capture="site"):
        t = torch.ones(3)
        CACHE["k"] = t
        assert ", created at " in holders(t).summary()
    found = holders(t)
    assert found == [
        "test_a_disposed_tensor_has_holders_and_the_site_of_a_scope_is_told.<locals>.t",
        K,
    ]
    assert found.summary().startswith("<DisposedTensor float32[3] on cpu, 12 B, ")
    assert found.summary().endswith(">: 2 references, 2 explained, 0 unexplained")


def test_a_module_is_told_with_what_it_weighs_and_its_balance():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    (shown,) = str(holders(model)).splitlines()[1:]
    assert shown.endswith("<locals>.model")
    assert holders(model).summary() == (
        "Sequential with 2 tensors, 24 B: 1 reference, 1 explained, 0 unexplained"
    )
    (name,) = holders(model[0])
    assert name.startswith("Sequential[0], held by ")
