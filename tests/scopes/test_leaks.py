"""The leak report: what is a leak, what the report says, and that it keeps nothing alive."""

import ctypes
import gc
import subprocess
import sys
import weakref

import pytest
import torch

from tenure import NewDisposeScope
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


def test_list_in_a_local_is_a_leak():
    history = []
    with reporting() as scope:
        history.append(torch.ones(3))
    (found,) = scope.leaks
    place = "test_list_in_a_local_is_a_leak.<locals>.history[0]"
    assert (found.shape, found.dtype, str(found.device)) == ((3,), torch.float32, "cpu")
    assert (found.nbytes, found.kind, found.holders) == (12, "container", (place,))
    assert found.created_at.startswith("tests/scopes/test_leaks.py:")


def test_leak_beside_a_variable_names_only_the_leak():
    with reporting() as scope:
        t = torch.ones(3)
        CACHE.append(t)
    (found,) = scope.leaks
    assert (found.kind, found.holders) == ("global", (f"{__name__}.CACHE[0]",))


def test_variables_of_running_functions_are_no_leak():
    with reporting() as scope:
        x = torch.ones(6).view(2, 3)
        pair = (torch.ones(2), (x * 2,))
        best = torch.ones(3, 2).max(0)
    assert not scope.leaks
    assert str(scope.leaks) == "<DisposeScope 'step'>: no tensors leaked."
    assert len(pair) == len(best) == 2


def test_reshaped_local_is_no_leak():
    with reporting() as scope:
        x = torch.ones(6)
        x = x.view(2, 3)
    assert not scope.leaks
    assert x.shape == (2, 3)


def test_graph_of_a_local_loss_is_no_leak_of_a_local_but_one_of_temporaries():
    leaf = torch.ones(3, requires_grad=True)
    with reporting() as scope:
        hidden = leaf * 2
        loss = (hidden * hidden).sin().sum()
    (found,) = scope.leaks
    assert found.kind == "autograd"
    assert "SinBackward0 (saved self) in the graph of " in found.holders[0]
    assert loss.requires_grad


def test_value_on_its_way_out_of_a_function_is_no_leak():
    scopes = []

    def make():
        with reporting() as scope:
            scopes.append(scope)
            t = torch.ones(3)
            return t

    make()
    assert len(scopes[0].leaks) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("whole_heap")
def test_reference_without_a_name_is_said_only_where_no_name_is():
    with reporting() as scope:
        t = torch.ones(3)
        CACHE.append(torch.zeros(3))
        refs = weakref.ref(t), weakref.ref(CACHE[0])
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(t))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(CACHE[0]))
        del t
    for ref in refs:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(ref()))
    alone, beside = scope.leaks
    text = "1 reference without a name: a value on its way, or an extension module"
    assert (alone.kind, alone.holders) == ("unknown", (text,))
    assert (beside.kind, beside.holders) == ("global", (f"{__name__}.CACHE[0]",))


def test_one_storage_counts_once():
    with reporting() as scope:
        CACHE.append(torch.ones(1024))
        CACHE.append(CACHE[0][:1])
    report = scope.leaks
    assert [r.nbytes for r in report.records] == [4096, 4096]
    assert [r.is_shared for r in report.records] == [False, True]
    assert report.total_bytes == 4096
    assert "(4.0 KiB)" in str(report)


def test_building_a_report_leaves_no_garbage():
    gc.collect()
    gc.disable()
    try:
        with reporting():
            CACHE.append(torch.ones(3))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_report_keeps_no_tensor_alive():
    with reporting() as scope:
        CACHE.append(torch.ones(3))
    ref = weakref.ref(CACHE.pop())
    assert ref() is None
    assert len(scope.leaks) == 1


def test_only_what_a_single_graph_alone_holds_has_its_name():
    leaf = torch.ones(3, requires_grad=True)
    with reporting() as scope:
        x, y, z = leaf * 2, leaf * 3, leaf * 4
        CACHE.extend([x.sin().sum(), (y * y).sum(), y.sin().sum(), (z.sin().sum(), z)])
        del x, y, z
    graphs = [found.graph for found in scope.leaks if found.shape == (3,) and not found.is_shared]
    assert graphs == [f"{__name__}.CACHE[0]", "", ""]


def test_text_names_scope_tensors_sites_and_the_first_holders():
    many = tuple(f"CACHE[{index}]" for index in range(5))
    unseen = record(shape=(), nbytes=0, created_at=None, holders=many, kind="global")
    report = LeakReport((record(), unseen), scope=SCOPE)
    assert str(report).splitlines() == [
        "<DisposeScope 'step'>: 2 tensors leaked, 64.0 KiB:",
        "  float16[32, 1024] on cuda:0, 64.0 KiB, created at train.py:17",
        "    held by train.<locals>.history[3]",
        "  float16[] on cuda:0, 0 B",
        "    held by CACHE[0]",
        "    held by CACHE[1]",
        "    held by CACHE[2]",
        "    and by 2 more",
    ]
    assert repr(report) == "<LeakReport of <DisposeScope 'step'>: 2 tensors leaked, 64.0 KiB>"


def saved(graph, **changes):
    node = "GeluBackward0 (saved self) in the graph of"
    return record(holders=(f"{node} {graph}",), kind="autograd", graph=graph, **changes)


def test_text_has_one_line_for_what_one_graph_saved():
    loss = record(shape=(), nbytes=4)
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
        "  float16[] on cuda:0, 4 B, created at train.py:17",
        "    held by train.<locals>.history[3]",
    ]
    assert len(report) == 7


def test_tables_have_one_row_for_what_one_graph_saved():
    report = LeakReport((saved("f.<locals>.a[0]"), saved("f.<locals>.a[0]")), scope="s")
    page = report._repr_html_()
    assert "2 tensors that autograd saved" in page
    assert "the graph of f.&lt;locals&gt;.a[0]" in page
    assert page.count("128.0 KiB") == 2


def test_one_tensor_is_spelled_in_the_singular():
    assert LeakReport((record(),), scope="'s'").summary() == "'s': 1 tensor leaked, 64.0 KiB"


def test_report_is_a_sequence_of_records_that_cannot_be_changed():
    report = LeakReport((record(),), scope=SCOPE)
    assert (len(report), bool(report), list(report)) == (1, True, [record()])
    with pytest.raises(AttributeError, match="kind"):
        report.records[0].kind = "other"


@pytest.mark.slow
def test_rich_is_not_imported_before_it_is_asked_to_render():
    code = "import sys, tenure.scopes; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
