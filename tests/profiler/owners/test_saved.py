"""What autograd keeps, against the allocator's truth; and that asking disturbs nothing."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tenure import NewDisposeScope
from tenure.profiler import ProfilerUsageError, SavedRecord, SavedReport, saved_for_backward

from ...programs import run_program
from . import saved_cases


@pytest.mark.slow
def test_the_bytes_found_are_those_the_allocator_holds():
    """In a process that runs torch's profiler."""
    done = run_program(Path(saved_cases.__file__), hides=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert {case: each["found"] for case, each in measured.items()} == {
        case: each["truth"] for case, each in measured.items()
    }
    assert sum(each["truth"] > 10_000 for each in measured.values()) >= 10


# what counts


def test_what_a_function_keeps_on_its_context_is_called_by_its_attribute():
    x = torch.ones(256, requires_grad=True)
    report = saved_for_backward(saved_cases.Stashing.apply(x))
    places = ("tensors", "stash", "box['k'][0]", "later: z")
    assert {record.saved_by for record in report if not record.is_leaf} == {
        (f"StashingBackward.{place}",) for place in places
    }
    assert report.total_bytes == 4 * 1024


def test_leaves_are_listed_and_count_only_where_the_graph_alone_still_has_them():
    x = torch.ones(256, requires_grad=True)
    report = saved_for_backward((x * x).sum())
    assert (report.total_bytes, report.leaf_bytes) == (0, 1024)
    (record,) = report.records
    assert record == SavedRecord(
        (256,), torch.float32, x.device, 1024, ("MulBackward0.other", "MulBackward0.self",
        "AccumulateGrad.variable"), None, is_leaf=True,
    )  # fmt: skip
    loss = (torch.ones(256, requires_grad=True) ** 2).sum()
    assert saved_for_backward(loss).total_bytes == 1024
    assert saved_for_backward(torch.ones(3)).n_nodes == 0


def times(make, weight):
    return (make() * weight).sum()


def test_an_input_that_is_a_view_or_an_alias_of_a_held_leaf_does_not_count():
    x, weight = torch.randn(64, 8), torch.ones(8, requires_grad=True)
    # made in functions: pytest keeps what an assertion makes on the way
    for taken, n_bytes in ((lambda: x[:32], 0), (x.detach, 0), (x.clone, x.nbytes)):
        loss = times(taken, weight)
        assert saved_for_backward(loss).total_bytes == n_bytes


def test_a_storage_that_two_roots_need_counts_once():
    x = torch.ones(256, requires_grad=True)
    y = x.exp()
    first, second = y.sin().sum(), y.cos().sum()
    assert saved_for_backward(first, second).total_bytes == y.nbytes
    assert saved_for_backward([first, {"second": second}], (first,)).total_bytes == y.nbytes


def test_sparse_gradients_indices_and_values_count():
    values = torch.ones(4, requires_grad=True)
    indices = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    sparse = torch.sparse_coo_tensor(indices, values.exp(), (4, 4), check_invariants=False)
    loss = torch.sparse.mm(sparse, torch.ones(4, 2, requires_grad=True)).sum()
    places = {place for record in saved_for_backward(loss) for place in record.saved_by}
    assert any(place.endswith(".values") for place in places)
    assert any(place.endswith(".indices") for place in places)


# asking changes nothing


def packed_graph(calls):
    """A leaf's double and a loss of it; ``"forward"`` and ``"unpack"`` are added to ``calls``."""

    def body(x):
        calls.append("forward")
        return x.exp()

    def unpack(packed):
        calls.append("unpack")
        return packed

    x = torch.ones(3, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        product = (x * x).sum()
    return x, checkpoint(body, x, use_reentrant=False).sum() + product


def test_no_hook_runs_and_no_checkpoint_is_recomputed():
    calls = []
    _, loss = packed_graph(calls)
    assert any(record.is_packed for record in saved_for_backward(loss))
    assert calls == ["forward"]
    loss.backward()


# what it says


def test_sites_of_a_scope_stand_in_the_report():
    x = torch.ones(2, 3, requires_grad=True)
    with NewDisposeScope("step", capture="site"):
        y = x * 2
        loss = y.sin().sum()
        report = saved_for_backward(loss)
    made = report.records[0].created_at
    assert made is not None
    assert made.rpartition(":")[0].endswith("test_saved.py")
    assert made in report.text(width=200)


REPORT = SavedReport(
    (
        SavedRecord((4,), torch.float32, torch.device("cpu"), 16, ("AccumulateGrad.variable",),
                    is_leaf=True),
        SavedRecord((8, 32), torch.float16, torch.device("cuda:0"), 512,
                    ("AddmmBackward0.mat1", "TBackward0.self"), "train.py:17"),
        SavedRecord((256,), torch.float32, torch.device("cpu"), 1024, ("A.x", "B.y", "C.z"),
                    is_packed=True),
    ),
    9,
)  # fmt: skip

TEXT = """\
9 nodes of autograd: 1.5 KiB saved in 2 storages, and 16 B of leaves
saved by                          storage  tensor                    created at
--------------------------------  -------  ------------------------  -----------
A.x, B.y and 1 more (packed)      1.0 KiB  float32[256] on cpu
AddmmBackward0.mat1,                512 B  float16[8, 32] on cuda:0  train.py:17
TBackward0.self
AccumulateGrad.variable (a leaf)     16 B  float32[4] on cpu"""


def test_the_table_puts_the_largest_first():
    assert str(REPORT) == TEXT
    assert repr(REPORT) == f"<SavedReport of {TEXT.splitlines()[0]}>"


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ((), r"was called without an argument\. Pass the results"),
        ((3,), r"got int without a tensor in it\. Pass the results that you would call"),
        (([],), r"got list without a tensor in it"),
    ],
)
def test_what_holds_no_tensor_is_refused(roots, message):
    with pytest.raises(ProfilerUsageError, match=message):
        saved_for_backward(*roots)
