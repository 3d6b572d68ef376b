"""The reporter: names, sums that add up, and nothing in the process that aborts it."""

import gc
import io
import json
import types
import warnings
import weakref
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tenure.profiler import (
    DeviceReport,
    MemReport,
    MemReporter,
    ProfilerUsageError,
    TensorRow,
    snapshot,
)
from tests.adaptive.ranks.launch import run_ranks
from tests.testing.machine import library_pool


def report_on(model=None, *, optimizer=None, **arguments):
    """A report without its output."""
    reporter = MemReporter(model)
    if optimizer is not None:
        reporter.add_optimizer(optimizer)
    with redirect_stdout(io.StringIO()):
        return reporter.report(**arguments)


def row_of(report, name):
    found = [row for row in report.rows if row.name == name]
    assert len(found) == 1, (name, [row.name for row in report.rows])
    return found[0]


def names_of(report, category=None):
    return [row.name for row in report.rows if category in (None, row.category)]


# sums


def train_once(model, x, optimizer):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return model(x).square().sum()


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("round_to_bytes", [1, 512])
def test_categories_are_the_total_of_the_allocator(sim, round_to_bytes):
    sim(round_to_bytes=round_to_bytes)
    model, x = transformer().to(sim.device), torch.randn(4, 8, 32).to(sim.device)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = train_once(model, x, optimizer)
    report = report_on(model, device=sim.device)
    assert report.total_bytes == sim.allocated_bytes
    assert report.unexplained_bytes == 0
    assert sum(report.categories.values()) == report.total_bytes
    n_parameters = sum(p.nbytes for p in model.parameters())
    assert report.categories["parameters"] == n_parameters
    assert report.categories["gradients"] == n_parameters
    assert report.categories["saved for backward"] > 0
    is_rounded = sim.allocated_bytes > sim.requested_bytes
    assert (report.categories["allocator rounding"] > 0) is is_rounded
    assert is_rounded or round_to_bytes == 1
    del loss
    after = report_on(model, device=sim.device)
    assert after.categories["saved for backward"] == 0
    assert after.total_bytes == sim.allocated_bytes


# names


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum() * self.scale.sum()


def test_parameters_buffers_and_gradients_have_their_names_in_the_model():
    model = Net()
    model(torch.ones(1, 2)).backward()
    report = report_on(model)
    assert report.unexplained_bytes == 0
    assert report.total_bytes == sum(report.categories.values()) > 0
    expected = [name for name, _ in model.named_parameters()]
    assert [name for name in names_of(report, "parameters") if name in expected] == expected
    weight = row_of(report, "layers.0.weight")
    assert (weight.category, weight.shape, weight.dtype) == ("parameters", (3, 2), "float32")
    assert weight.n_bytes == 24
    assert row_of(report, "scale").category == "buffers"
    assert row_of(report, "layers.0.weight.grad").category == "gradients"


def test_a_model_that_was_not_given_is_named_after_its_class():
    class Lonely(nn.Linear):
        pass

    first, second = Lonely(2, 2), Lonely(2, 2)
    found = {name for name in names_of(report_on(), "parameters") if "Lonely" in name}
    prefix = Lonely.__qualname__
    expected = {f"{prefix}{n}.{kind}" for n in ("", "#2") for kind in ("weight", "bias")}
    assert found == expected
    assert first is not second


def test_optimizer_state_is_named_after_its_parameter():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).backward()
    optimizer.step()
    for given in (optimizer, None):
        row = row_of(report_on(model, optimizer=given), "Adam.layers.1.bias.exp_avg")
        assert (row.category, row.n_bytes) == ("optimizer state", 8)


def test_what_only_autograd_has_is_named_after_its_node():
    linear, x = nn.Linear(8, 8), torch.ones(16, 8)
    loss = linear(x * (x + 2)).mean()
    report = report_on(linear)
    row = next(row for row in report.rows if row.name.startswith("AddmmBackward0.mat1"))
    assert (row.category, row.n_bytes) == ("saved for backward", 512)
    free, out = nn.Parameter(torch.ones(7)), x * linear.weight.exp().sum()
    loss = loss + out.sin().sum()
    here = "test_what_only_autograd_has_is_named_after_its_node.<locals>"
    assert row_of(report_on(), f"{here}.out").category == "saved for backward"
    loss.backward()
    assert row_of(report_on(), f"{here}.out").category == "other tensors"
    assert row_of(report_on(), f"{here}.free").category == "parameters"
    assert free.grad is None


def test_tied_weights_are_one_row_whose_names_are_joined():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    report = report_on(model)
    row = row_of(report, "0.weight+1.weight")
    assert row.n_bytes == 64
    model(torch.ones(1, 4)).sum().backward()
    assert row_of(report_on(model), "0.weight+1.weight.grad").n_bytes == 64


def test_shared_storages_count_once_and_an_arrow_names_the_owner():
    base = torch.ones(1024)
    part = base[:4]
    prefix = "test_shared_storages_count_once_and_an_arrow_names_the_owner.<locals>"
    report = report_on(verbose=True)
    rows = {row.name: row for row in report.rows if row.name.startswith(prefix)}
    assert [row.n_bytes for row in rows.values()] == [4096, 4096]
    assert [row.counted_bytes for row in rows.values()] == [4096, 0]
    assert rows[f"{prefix}.part"].owner == f"{prefix}.base"
    assert f"{prefix}.part(->{prefix}.base)" in report.text(top=10**6, width=400)
    assert "(->" not in str(report_on())
    assert part.data_ptr() == base.data_ptr()


# defects of pytorch_memlab, each of them


class Deprecated:
    """Warns when it is asked for its class, as `isinstance` asks."""

    @property
    def __class__(self):
        warnings.warn("asked for its class", FutureWarning, stacklevel=2)
        return object


class Secretive(torch.Tensor):
    """Refuses every function of torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Wrapper(TwoTensor):
    """A wrapper whose own code fails."""

    def __tensor_flatten__(self):
        raise ValueError("no")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def odd_objects():
    indices = torch.tensor([[0, 1], [1, 0]])
    yield torch.sparse_coo_tensor(indices, torch.ones(2), (2, 2), check_invariants=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.eye(4).to_sparse(layout=torch.sparse_csr)
        yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        yield torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    yield torch.ones(3, device="meta")
    with FakeTensorMode():
        yield torch.ones(3)
    yield torch.ones(3).as_subclass(Secretive)
    yield Wrapper(torch.ones(3), torch.ones(3))
    yield nn.UninitializedParameter()
    yield Deprecated()
    dead = nn.Linear(1, 1)
    yield weakref.proxy(dead)


def test_odd_and_broken_objects_abort_no_report_and_cause_no_warning():
    kept = list(odd_objects())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = report_on(verbose=True)
    prefix = "test_odd_and_broken_objects_abort_no_report_and_cause_no_warning.<locals>.kept"
    found = {row.name.removeprefix(prefix) for row in report.rows if row.name.startswith(prefix)}
    # of each layout its parts, and the wrapper's inner tensor
    assert {"[0].indices", "[0].values", "[1].crow_indices", "[2]", "[3]._values"} <= found
    assert {"[3]._offsets", "[4]", "[7]", "[8].a"} <= found
    # what has no memory
    assert not {"[5]", "[6]"} & found
    assert len(kept) == 12


def test_vmap_and_modes_are_passed_by():
    seen = []

    def inside(x):
        seen.append(report_on())
        return x * 2

    batch = torch.ones(4, 3)
    torch.func.vmap(inside)(batch)
    with FakeTensorMode():
        seen.append(report_on())
    assert batch.nbytes
    assert all(report.total_bytes > 0 for report in seen)


def test_the_reporter_keeps_no_tensor_alive(sim):
    model = nn.Linear(64, 64).to(sim.device)
    reporter = MemReporter(model)
    optimizer = torch.optim.Adam(model.parameters())
    reporter.add_optimizer(optimizer)
    loss = train_once(model, torch.ones(2, 64).to(sim.device), optimizer)
    with redirect_stdout(io.StringIO()):
        report = reporter.report()
    reporter.collect_tensor()
    gone = weakref.ref(model)
    del model, optimizer, loss
    assert gone() is None
    gc.collect()
    assert sim.allocated_bytes == 0
    assert report.total_bytes > 0


# the table

ROWS = (
    TensorRow("0.weight", "parameters", (1024, 1024), "float32", "cuda:0", 4 << 20),
    TensorRow("view", "parameters", (4,), "float32", "cuda:0", 0, "0.weight"),
    TensorRow("train.<locals>.loss", "other tensors", (), "float32", "cuda:0", 4, None, "a.py:7"),
)
REPORT = MemReport(
    (
        DeviceReport("cpu", (), {"parameters": 0, "other tensors": 0}, 0),
        DeviceReport(
            "cuda:0", ROWS, {"parameters": 4 << 20, "other tensors": 4, "allocator rounding": 508},
            (4 << 20) + 1536, True, 20 << 20, 1 << 30,
        ),
    ),
    verbose=True,
)  # fmt: skip

TEXT = """\
Storage on cpu
No tensors are there.
The total is that of the storages found: cpu counts no live bytes.
Storage on cuda:0
Element type                 Size  Used MEM  Category       Created at
-------------------  ------------  --------  -------------  ----------
0.weight             (1024, 1024)   4.0 MiB  parameters
train.<locals>.loss            ()       4 B  other tensors  a.py:7
view(->0.weight)             (4,)     (0 B)  parameters
In brackets: in the storage of another row, which counts it.
Total: 3 tensors, 4.0 MiB
category              bytes   share
------------------  -------  ------  --------------------------------
parameters          4.0 MiB  100.0%  ███████████████████████████████▉
unexplained         1.0 KiB    0.0%                                 ▕
allocator rounding    508 B    0.0%                                 ▕
other tensors           4 B    0.0%                                 ▕
total               4.0 MiB  100.0%  ████████████████████████████████
The allocated memory on cuda:0: 4.0 MiB, of 20.0 MiB that the allocator has
reserved.
In use on cuda:0 by all processes and the driver: 1.0 GiB."""


def test_the_printed_table_and_its_dictionary():
    assert str(REPORT) == TEXT
    assert repr(REPORT) == "<MemReport of 3 tensors, 4.0 MiB>"
    data = json.loads(json.dumps(REPORT.to_dict()))
    assert data["total_bytes"] == sum(data["categories"].values()) + data["unexplained_bytes"]
    assert data["devices"][1]["tensors"][0]["shape"] == [1024, 1024]


def test_the_table_goes_to_the_standard_output_of_the_moment():
    first, second = io.StringIO(), io.StringIO()
    reporter = MemReporter()
    with redirect_stdout(first):
        report = reporter.report(device="meta")
    with redirect_stdout(second):
        reporter.collect_tensor()
        reporter.get_stats()
        reporter.print_stats(target_device="meta")
    assert first.getvalue() == f"{report}\n"
    assert second.getvalue().startswith("Storage on meta")


# refusals


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: MemReporter(3), r"wants the nn\.Module whose names to use, and got int"),
        (lambda: MemReporter().add_optimizer(3), r"wants a torch\.optim\.Optimizer, and got int"),
        (lambda: MemReporter().report(device="gpu"), r"'gpu' is no device that this torch knows"),
        (lambda: MemReporter().report(device=[]), r"\[\] is no device that this torch knows"),
        (lambda: MemReporter().report_group(), r"needs a process group, and none has been set up"),
    ],
)
def test_what_it_cannot_use_is_refused(ask, message):
    with pytest.raises(ProfilerUsageError, match=message):
        ask()


def report_of_group(rank):
    model = nn.Linear(8, 8 * (rank + 1), bias=False)
    model(torch.ones(2, 8)).sum().backward()
    with redirect_stdout(io.StringIO()) as printed:
        found = MemReporter(model).report_group()
    parameters = [found[each].categories["parameters"] for each in range(2)]
    return [parameters, printed.getvalue().count("rank ")]


def test_every_rank_gets_the_reports_of_all_and_the_first_prints_them():
    assert run_ranks(report_of_group) == [[[256, 512], 2], [[256, 512], 0]]


# --- devices with a caching allocator: its free blocks, and what libraries took of it


MIB = 1 << 20
WORKSPACE = 8_519_680  # what torch takes for cuBLAS by default


def block(size, state="active_allocated", requested=None):
    return {"size": size, "state": state, "requested_size": requested or size, "address": 0}


def segment(*blocks, device=0):
    return {"device": device, "blocks": list(blocks)}


@pytest.fixture
def backend(monkeypatch):
    """A backend whose module has what a test gives it; returns the report of its device."""

    def install(kind="cuda", **functions):
        module = types.SimpleNamespace(device_count=lambda: 1, **functions)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        (found,) = MemReporter().get_stats(device=f"{kind}:0").devices
        return found

    return install


@pytest.fixture
def cublas(monkeypatch):
    """A torch that keeps one block for each handle of cuBLAS, and one of cuBLASLt."""
    sizes = {"cuBLAS": WORKSPACE, "cuBLASLt": MIB}
    # no public name says what a library that is not here takes
    monkeypatch.setattr("tenure.profiler._allocator.workspace_bytes", lambda device: sizes)


def refusing(*_):
    raise RuntimeError("not on this backend")


STATS = {
    "allocated_bytes.all.current": 1536,
    "requested_bytes.all.current": 1100,
    "reserved_bytes.all.current": 4096,
}


def test_what_a_backend_tells_is_in_its_report(backend):
    found = backend(memory_stats=lambda device: STATS, mem_get_info=lambda device: (1000, 9000))
    assert found.is_counted
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (1536, 4096, 8000)
    assert found.categories["allocator rounding"] == 1536 - 1100
    # one number alone
    found = backend(memory_stats=refusing, memory_allocated=lambda device: 512)
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (512, 512, None)
    assert found.categories["allocator rounding"] == 0


def test_a_backend_that_is_not_in_use_is_not_brought_to_life(backend):
    found = backend(
        is_initialized=lambda: False,
        memory_stats=lambda device: {},
        memory_allocated=lambda device: 0,
        mem_get_info=lambda device: pytest.fail("a context came to life"),
    )
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (0, 0, None)


def test_free_blocks_are_told_apart_by_what_lies_beside_them(backend):
    segments = [
        segment(block(MIB), block(3 * MIB, "inactive"), block(512), block(2 * MIB, "inactive")),
        segment(block(20 * MIB, "inactive")),
        segment(block(4 * MIB, "active_pending_free"), block(MIB, "inactive")),
        segment(block(90 * MIB, "inactive"), device=1),
    ]
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: segments)
    assert (found.largest_free_bytes, found.inactive_split_bytes) == (20 * MIB, 6 * MIB)
    # CUDA is not in use, and no library of it
    assert "library workspaces" not in found.categories


@pytest.mark.parametrize("entries", [(), ({"device": 0},)])
def test_an_allocator_that_tells_of_no_blocks_is_not_asked_further(backend, cublas, entries):
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: list(entries))
    assert (found.largest_free_bytes, found.inactive_split_bytes) == (None, None)
    assert "library workspaces" not in found.categories


def test_free_blocks_of_the_size_of_a_workspace_are_none(backend, cublas):
    blocks = [*[block(WORKSPACE)] * 2, block(WORKSPACE, "inactive"), block(MIB), block(77)]
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: [segment(*blocks)])
    assert found.categories["library workspaces"] == 2 * WORKSPACE + MIB


def test_a_report_names_workspaces_and_still_adds_up(sim, cublas):
    sim(allocator="cuda")
    gc.collect()
    kept = torch.ones(3 * MIB, device=sim.device)
    pool = library_pool()
    taken = [pool.allocate(n_bytes, 0.0) for n_bytes in (WORKSPACE, WORKSPACE, 1000)]
    report = MemReporter().report(device=sim.device)
    seen = snapshot().report.devices
    for each in taken:
        pool.free(each)
    assert report.categories["library workspaces"] == 2 * WORKSPACE
    assert report.unexplained_bytes == 1000
    assert report.total_bytes == sum(report.categories.values()) + 1000
    assert report.total_bytes == kept.nbytes + 2 * WORKSPACE + 1024
    assert seen[[d.device for d in seen].index("sim:0")].categories == report.categories


def test_a_report_says_what_is_reserved_and_how_it_is_cut(sim):
    sim(allocator="cuda")
    gc.collect()
    blocks = [torch.ones(MIB, device=sim.device) for _ in range(5)]  # of 4 MiB, in 20
    gone = torch.ones(8 * MIB, device=sim.device)  # a segment of its own
    del blocks[1::2], gone
    report = MemReporter().report(device=sim.device)
    (device,) = report.devices
    assert device.total_bytes == 12 * MIB
    assert device.reserved_bytes == 52 * MIB
    assert device.largest_free_bytes == 32 * MIB
    assert device.inactive_split_bytes == 8 * MIB
    assert device.reserved_bytes == sim.module.memory_reserved()
    assert (
        "The allocated memory on sim:0: 12.0 MiB, of 52.0 MiB that the allocator has reserved.\n"
        "Free of that: 40.0 MiB, the largest block 32.0 MiB; beside blocks in use, where "
        "empty_cache() can't reach it: 8.0 MiB."
    ) in report.text(width=300)
    told = report.to_dict()["devices"][0]
    assert (told["largest_free_bytes"], told["inactive_split_bytes"]) == (32 * MIB, 8 * MIB)
    sim.module.empty_cache()
    assert sim.module.memory_reserved() == 20 * MIB  # 8 of them are those beside blocks in use
