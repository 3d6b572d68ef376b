"""The leak report: what is a leak, what the report says, and that it keeps nothing alive."""

import ctypes
import gc
import io
import subprocess
import sys
import weakref

import pytest
import torch

from tenure.scopes import _leaks
from tenure.scopes._leaks import LeakRecord, LeakReport, build_leak_report

CACHE = []
SCOPE = "<DisposeScope 'step'>"


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    CACHE.clear()


def report_on(*refs):
    """Report on tensors by weak reference, so that nothing here holds them."""
    return build_leak_report([(ref(), "train.py:17") for ref in refs], scope=SCOPE)


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


def test_no_survivors_no_heap_scan(monkeypatch):
    monkeypatch.setattr(_leaks, "find_holders", lambda *args, **kwargs: pytest.fail("searched"))
    report = build_leak_report([], scope=SCOPE)
    assert not report
    assert str(report) == "<DisposeScope 'step'>: no tensors leaked."


def test_variables_of_running_functions_are_no_leak():
    t = torch.ones(3)
    assert not report_on(weakref.ref(t))
    assert not build_leak_report([(t, None)], scope=SCOPE)


def test_survivors_that_only_the_caller_lists_are_no_leak():
    own = [torch.ones(3)]
    assert not build_leak_report([(own[0], None)], scope=SCOPE, ignore=(own,))


def test_list_in_a_local_is_a_leak():
    history = [torch.ones(3)]
    (found,) = report_on(weakref.ref(history[0])).records
    assert found == LeakRecord(
        shape=(3,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        nbytes=12,
        created_at="train.py:17",
        holders=("test_list_in_a_local_is_a_leak.<locals>.history[0]",),
        kind="container",
    )


def test_leak_beside_a_variable_names_only_the_leak():
    t = torch.ones(3)
    CACHE.append(t)
    (found,) = report_on(weakref.ref(t)).records
    assert (found.kind, found.holders) == ("global", (f"{__name__}.CACHE[0]",))


def test_reshaped_local_is_no_leak():
    x = torch.ones(6)
    ref, x = weakref.ref(x), x.view(2, 3)
    assert not report_on(ref, weakref.ref(x))


def test_graph_of_a_local_loss_is_no_leak_of_a_local_but_one_of_temporaries():
    hidden = torch.ones(3, requires_grad=True) * 2
    product = hidden * hidden
    ref, loss = weakref.ref(product), product.sin().sum()
    assert not report_on(weakref.ref(hidden))
    del product
    assert [r.kind for r in report_on(ref).records] == ["autograd"]
    assert loss.requires_grad


def test_value_on_its_way_out_of_a_function_is_no_leak():
    reports = []

    class Watch:
        def __enter__(self):
            return self

        def __exit__(self, *exc):
            reports.append(report_on(self.ref))

    def make():
        with Watch() as watch:
            t = torch.ones(3)
            watch.ref = weakref.ref(t)
            return t

    make()
    assert [len(report) for report in reports] == [0]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_heap")
def test_reference_without_a_name_is_said_only_where_no_name_is():
    t = torch.ones(3)
    ref = weakref.ref(t)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(t))
    del t
    (alone,) = report_on(ref).records
    CACHE.append(ref())
    (beside,) = report_on(ref).records
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(ref()))
    text = "1 reference without a name: a value on its way, or an extension module"
    assert (alone.kind, alone.holders) == ("unknown", (text,))
    assert (beside.kind, beside.holders) == ("global", (f"{__name__}.CACHE[0]",))


def test_one_storage_counts_once():
    whole = torch.ones(1024)
    CACHE.extend([whole, whole[:1]])
    report = report_on(weakref.ref(whole), weakref.ref(CACHE[1]))
    assert [r.nbytes for r in report.records] == [4096, 4096]
    assert [r.is_shared for r in report.records] == [False, True]
    assert report.total_bytes == 4096
    assert "(4.0 KiB)" in str(report)
    assert report.total_bytes == 4096


def test_report_keeps_no_tensor_alive():
    CACHE.append(torch.ones(3))
    ref = weakref.ref(CACHE[0])
    report = report_on(ref)
    CACHE.clear()
    assert ref() is None
    assert len(report) == 1


def test_building_a_report_leaves_no_garbage():
    CACHE.append(torch.ones(3))
    gc.collect()
    gc.disable()
    try:
        report_on(weakref.ref(CACHE[0]))
        assert gc.collect() == 0
    finally:
        gc.enable()


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


def test_only_what_a_single_graph_alone_holds_has_its_name():
    leaf = torch.ones(3, requires_grad=True)
    x, y = leaf * 2, leaf * 3
    CACHE.extend([x.sin().sum(), (y * y).sum(), y.sin().sum()])
    refs = weakref.ref(x), weakref.ref(y)
    del x, y
    graphs = [found.graph for found in report_on(*refs).records]
    assert graphs == [f"{__name__}.CACHE[0]", ""]
    CACHE.append(refs[0]())
    assert [found.graph for found in report_on(*refs).records] == ["", ""]


def test_one_tensor_is_spelled_in_the_singular():
    assert LeakReport((record(),), scope="'s'").summary() == "'s': 1 tensor leaked, 64.0 KiB"


def test_report_is_a_sequence_of_records_that_cannot_be_changed():
    report = LeakReport((record(),), scope=SCOPE)
    assert (len(report), bool(report), list(report)) == (1, True, [record()])
    with pytest.raises(AttributeError, match="kind"):
        report.records[0].kind = "other"


def test_rich_prints_the_same_lines():
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=84)
    report = LeakReport((record(),), scope=SCOPE)
    console.print(report)
    assert (
        console.file.getvalue().splitlines()
        == report.text(width=84).splitlines()
        == [
            "<DisposeScope 'step'>: 1 tensor leaked, 64.0 KiB:",
            "  float16[32, 1024] on cuda:0, 64.0 KiB, created at train.py:17",
            "    held by train.<locals>.history[3]",
        ]
    )


def test_tables_have_one_row_for_what_one_graph_saved():
    report = LeakReport((saved("f.<locals>.a[0]"), saved("f.<locals>.a[0]")), scope="s")
    page = report._repr_html_()
    assert "2 tensors that autograd saved" in page
    assert "the graph of f.&lt;locals&gt;.a[0]" in page
    assert page.count("128.0 KiB") == 2


def test_html_is_escaped():
    hostile = record(holders=("f.<locals>.table['<script>']", "b"), created_at=None)
    text = LeakReport((hostile,), scope="<s>")._repr_html_()
    assert "&lt;s&gt;: 1 tensor leaked, 64.0 KiB" in text
    assert "f.&lt;locals&gt;.table[&#x27;&lt;script&gt;&#x27;]" in text
    assert "<s" not in text.replace("<span", "")


@pytest.mark.slow
def test_rich_is_not_imported_before_it_is_asked_to_render():
    code = "import sys, tenure.scopes._leaks; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
