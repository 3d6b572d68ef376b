"""The leak report: what is a leak, what the report says, and that it keeps nothing alive."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tenure import NewDisposeScope, owner_of
from tenure._heap import _holders
from tenure.scopes import LeakRecord, LeakReport

CACHE = []
SCOPE = "<DisposeScope 'step'>"


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


def reporting():
    return NewDisposeScope("step", policy="report")


def record(**changes):
    fields = {
        "shape": (32, 1024),
        "dtype": torch.float16,
        "device": torch.device("cuda:0"),
        "nbytes": 65_536,
        "created_at": "train.py:17",
        "holders": ("train.<locals>.history[3]",),
        "kind": "container",
    }
    return LeakRecord(**(fields | changes))


@pytest.mark.parametrize(
    "run", [lambda body: body, torch._dynamo.run], ids=["plain", "evaluated by torch.compile"]
)
def test_a_leak_is_held_by_the_users_list_and_by_nothing_of_the_scope(run):
    history = []

    def step():
        with reporting() as scope:
            t = torch.ones(3)
            history.append(t)
            # the address of one that died is used again
            junk = [torch.zeros(1) for _ in range(50)]
            CACHE.append(torch.zeros(2))
            del junk
            CACHE.append(torch.zeros(3))
        return scope.leaks, t

    gc.collect()
    gc.disable()
    try:
        report, _ = run(step)()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert [each.shape for each in report] == [(3,), (2,), (3,)]
    found, _, last = report
    place = f"{step.__qualname__.rpartition('.<locals>')[0]}.<locals>.history[0]"
    assert (found.dtype, str(found.device), found.nbytes) == (torch.float32, "cpu", 12)
    assert (found.kind, found.holders) == ("container", (place,))
    assert owner_of(history[0]) is None
    assert (last.kind, last.holders) == ("global", (f"{__name__}.CACHE[1]",))
    assert found.created_at.startswith("tests/scopes/test_leaks.py:")
    refs = list(map(weakref.ref, (history.pop(), CACHE.pop(), CACHE.pop())))
    del _
    assert [ref() for ref in refs] == [None] * 3
    assert len(report) == 3


def test_variables_of_running_functions_and_values_on_their_way_out_are_no_leak():
    scopes = []

    def make():
        with reporting() as scope:
            scopes.append(scope)
            t = torch.ones(3)
            return t

    make()
    with reporting() as scope:
        x = torch.ones(6)
        x = x.view(2, 3)
        pair = (torch.ones(2), (x * 2,))
        best = torch.ones(3, 2).max(0)
    for each in (scope, *scopes):
        assert not each.leaks
        assert str(each.leaks) == "<DisposeScope 'step'>: no tensors leaked."
    assert len(pair) == len(best) == 2


def test_an_array_that_keeps_the_memory_of_a_tensor_is_a_leak_unless_it_is_a_variable():
    history = []
    with reporting() as scope:
        x = torch.ones(4)
        history += [x.detach().numpy()[1:], np.asarray(x * 2), (x + 1).numpy().sum()]
        local = (x * 3).numpy()
        del x
    place = f"numpy array {sys._getframe().f_code.co_qualname}.<locals>.history"
    assert [each.holders for each in scope.leaks] == [(f"{place}[{i}]",) for i in range(2)]
    with NewDisposeScope():
        history.append((torch.ones(4) * 5).numpy())
    assert history[-1].tolist() == [5.0] * 4
    assert local.tolist() == [3.0] * 4


def test_graph_of_a_local_loss_is_no_leak_of_a_local_but_one_of_temporaries():
    leaf = torch.ones(3, requires_grad=True)
    with reporting() as scope:
        hidden = leaf * 2
        loss = (hidden * hidden).sin().sum()
    (found,) = scope.leaks
    assert found.kind == "autograd"
    assert "SinBackward0 (saved self) in the graph of " in found.holders[0]
    assert loss.requires_grad


def test_what_only_the_exception_of_the_block_holds_is_no_leak():
    def request(kept):
        parts, captured = {"k": [torch.ones(2)]}, torch.ones(3)
        CACHE.append(torch.ones(4))

        def inner():
            local = torch.ones(5, requires_grad=True)
            raise ValueError(torch.ones(6), (local * 2).sin(), captured)

        try:
            inner()
        except ValueError as error:
            kept.append(error)
            raise KeyError(torch.ones(7)) from error
        return parts

    chains = []
    errors = []
    for kept in (deque(maxlen=0), errors):
        with pytest.raises(KeyError), reporting() as scope:
            request(kept)
        chains.append([(each.shape, each.holders[0]) for each in scope.leaks])
    assert chains[0] == [((4,), f"{__name__}.CACHE[0]")]
    inner = f"{request.__qualname__}.<locals>.inner(): local local"
    held_by = f"{request.__qualname__.rpartition('.')[0]}.errors[0]"
    expected = f"traceback of ValueError in {inner}, held by {held_by}"
    assert ((5,), expected) in chains[1]
    assert (7,) not in dict(chains[1])


def test_scopes_of_several_threads_search_one_after_the_other(monkeypatch):
    running, most = [], []
    search = _holders.Search

    def noted(*args):
        running.append(None)
        time.sleep(0.02)
        most.append(len(running))
        found = search(*args)
        running.pop()
        return found

    def request():
        with reporting() as scope:
            CACHE.append(torch.ones(2))
        return scope.leaks

    monkeypatch.setattr(_holders, "Search", noted)
    with ThreadPoolExecutor(4) as pool:
        reports = [pool.submit(request) for _ in range(4)]
    assert most == [1] * 4
    assert {each.result().records[0].kind for each in reports} == {"global"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_during_a_search_can_search(monkeypatch):
    begun, search = threading.Event(), _holders.Search

    def slow(*args):
        begun.set()
        time.sleep(0.1)
        return search(*args)

    CACHE.append(torch.ones(2))
    monkeypatch.setattr(_holders, "Search", slow)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_holders.find_holders, CACHE)
        begun.wait(10)
        if not (child := os.fork()):
            try:
                # in place of waiting for ever
                signal.alarm(10)
                _holders.find_holders(CACHE)
                os._exit(0 if gc.isenabled() else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_storage_counts_once():
    with reporting() as scope:
        CACHE.append(torch.ones(1024))
        CACHE.append(CACHE[0][:1])
    assert [r.nbytes for r in scope.leaks] == [4096, 4096]
    assert [r.is_shared for r in scope.leaks] == [False, True]
    assert scope.leaks.total_bytes == 4096
    assert "(4.0 KiB)" in str(scope.leaks)


def test_only_what_a_single_graph_alone_holds_has_its_name():
    leaf = torch.ones(3, requires_grad=True)
    with reporting() as scope:
        x, y, z = leaf * 2, leaf * 3, leaf * 4
        CACHE.extend([x.sin().sum(), (y * y).sum(), y.sin().sum(), (z.sin().sum(), z)])
        del x, y, z
    graphs = [found.graph for found in scope.leaks if found.shape == (3,) and not found.is_shared]
    assert graphs == [f"{__name__}.CACHE[0]", "", ""]


def saved(graph, **changes):
    node = "GeluBackward0 (saved self) in the graph of"
    return record(holders=(f"{node} {graph}",), kind="autograd", graph=graph, **changes)


def test_text_has_one_line_for_what_one_graph_saved():
    many = tuple(f"CACHE[{index}]" for index in range(5))
    loss = record(shape=(), nbytes=4, created_at=None, holders=many, kind="global")
    first, second = "train.<locals>.history[3]", "CACHE['loss']"
    report = LeakReport(
        (
            saved(first, nbytes=10),
            saved(second),
            saved("alone[0]", shape=(2,)),
            saved(first, nbytes=20, created_at="model.py:58"),
            saved(second, created_at=None),
            saved(first, nbytes=20),
            loss,
        ),
        scope=SCOPE,
    )
    assert str(report).splitlines() == [
        "<DisposeScope 'step'>: 7 tensors leaked, 192.1 KiB:",
        "  2 tensors that autograd saved, 128.0 KiB",
        "    the largest float16[32, 1024] on cuda:0, 64.0 KiB, created at train.py:17",
        "    held by the graph of CACHE['loss']",
        "  float16[2] on cuda:0, 64.0 KiB, created at train.py:17",
        "    held by GeluBackward0 (saved self) in the graph of alone[0]",
        "  3 tensors that autograd saved, 50 B",
        "    the largest float16[32, 1024] on cuda:0, 20 B, created at model.py:58",
        "    held by the graph of train.<locals>.history[3]",
        "  float16[] on cuda:0, 4 B",
        "    held by CACHE[0]",
        "    held by CACHE[1]",
        "    held by CACHE[2]",
        "    and by 2 more",
    ]
    assert repr(report) == "<LeakReport of <DisposeScope 'step'>: 7 tensors leaked, 192.1 KiB>"
    page = report._repr_html_()
    assert "3 tensors that autograd saved" in page
    assert "the graph of train.&lt;locals&gt;.history[3]" in page
