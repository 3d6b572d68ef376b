"""Who holds a tensor, in the public words: a list of names, and a balance that adds up."""

import ctypes
import gc
import logging
import pickle
import sys

import pytest
import torch

from tenure import NewDisposeScope
from tenure.profiler import HolderList, ProfilerUsageError, holders

CACHE = {}
HERE = __name__


class Box:
    """Anything with attributes."""


class Keeping(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


def fail(u):
    raise ValueError


def generate(u):
    yield u


def caught(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error.with_traceback(error.__traceback__.tb_next)


def logged(t):
    handler, logger = Keeping(), logging.Logger("planted")
    logger.addHandler(handler)
    logger.warning("loss %s", t)
    return handler


K = f"{HERE}.CACHE['k']"
CLOSURE = "closure of keep.<locals>.<lambda>: t, held by"
KEEPERS = {
    "CACHE['k'] = t": K,
    "CACHE['k'] = Box(); CACHE['k'].x = t": f"{K}.x",
    "CACHE['k'] = lambda: t": f"{CLOSURE} {K}",
    "CACHE['k'] = lambda x=t: x": f"default of keep.<locals>.<lambda>: x, held by {K}",
    "CACHE['k'] = functools.partial(print, t)": f"partial of print: args[0], held by {K}",
    "CACHE['k'] = generate(t); next(CACHE['k'])": f"generator generate: local u, held by {K}",
    "CACHE['k'] = caught(fail, t)": f"traceback of ValueError in fail(): local u, held by {K}",
    "CACHE['k'] = t[:1]": f"a view in {K}",
    "CACHE['k'] = (torch.ones(3, requires_grad=True) * t).sum()": (
        f"MulBackward0 (saved other) in the graph of {K}"
    ),
    "CACHE['k'] = logged(t)": f"{K}.records[0].args[0]",
    "CACHE['k'] = {'__name__': 'notebook', '__builtins__': {}, 'Out': {3: t}}": "notebook.Out[3]",
    "CACHE['k'] = torch.nn.Linear(1, 1); CACHE['k'].register_forward_hook(lambda *_: t)": (
        f"{CLOSURE} Linear._forward_hooks["
    ),
    "CACHE['k'] = torch.zeros(1).requires_grad_(); CACHE['k'].register_hook(lambda g: t)": CLOSURE,
    "CACHE['b'] = Box(); CACHE['k'] = weakref.ref(CACHE['b'], lambda _: t)": f"{CLOSURE} {K}",
}


@pytest.mark.parametrize("keep", KEEPERS, ids=[keep[:60] for keep in KEEPERS])
def test_every_way_to_keep_a_tensor_is_named_and_the_balance_is_the_interpreters(keep):
    made = {}
    exec(f"def keep(t):\n    import functools, weakref\n    {keep}", globals(), made)
    t = torch.ones(3)
    made["keep"](t)
    gc.collect()
    found = holders(t)
    assert any(name.startswith(KEEPERS[keep]) for name in found), found
    # the variable is one reference, and up to Python 3.13 the argument of getrefcount another one
    alone = torch.ones(1)
    assert found.n_references == sys.getrefcount(t) - sys.getrefcount(alone) + 1
    assert found.n_unexplained == 0


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
    (name,) = holders(model[0])
    assert name.startswith("Sequential[0], held by ")
