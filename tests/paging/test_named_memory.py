"""Reports of memory name what a pager keeps, and count each of its bytes once."""

import gc

import pytest
import torch
from torch import nn

from tenure.paging import page
from tenure.profiler import MemReporter, snapshot
from tests.shrinking import ask_to_shrink

from .models import build, linears
from .support import weight_bytes

pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.slow,  # each looks through the whole heap, some many times
]


@pytest.fixture(autouse=True)
def _without_garbage():
    """A report lists what earlier tests left to the collector, which this device does not count."""
    gc.collect()


def report_on(model=None, **arguments):
    return MemReporter(model).report(**arguments)


def assert_exact(sim, report):
    (device,) = [each for each in report.devices if each.device == str(sim.device)]
    assert device.total_bytes == sim.allocated_bytes
    assert sum(device.categories.values()) + device.unexplained_bytes == sim.allocated_bytes
    assert device.unexplained_bytes == 0
    return device


@pytest.mark.parametrize(("name", "round_to_bytes"), [("resnet", 1), ("tied", 512)])
def test_the_bytes_of_a_paged_model_are_the_allocators_total(sim, name, round_to_bytes):
    sim(round_to_bytes=round_to_bytes)
    model, args, kwargs = build(name)
    with page(model, sim.device, budget=int(weight_bytes(model) * 1.2) + 8192) as handle:
        output = model(*args, **kwargs)
        report = handle.report()
        device = assert_exact(sim, report_on(model))
        assert device.categories.get("paged: resident", 0) == report.resident_bytes
        assert device.categories.get("paged: ring", 0) == report.ring_bytes
        assert device.categories["parameters"] == device.categories["buffers"] == 0
    del output


def test_in_slabs_each_unit_has_a_row_and_no_byte_counts_twice(sim):
    sim(allocator="cuda")
    model = nn.Sequential(*[nn.Linear(1024, 900, bias=False) for _ in range(12)])
    with page(model, sim.device, "4MiB", budget="21MiB") as handle:
        model[0](torch.randn(2, 1024))
        device = assert_exact(sim, report_on(model))
        assert device.categories["paged: resident"] == handle.report().resident_bytes
        assert device.categories["paged: ring"] == handle.report().ring_bytes
        names = [row.name for row in device.rows if row.category.startswith("paged")]
        assert sorted(names) == sorted([*(u.name for u in handle.plan.units if u.resident), "ring"])
        before = snapshot().report.devices
        model[1](torch.randn(2, 1024))
        told = [
            {each.device: each.total_bytes for each in at}
            for at in (before, snapshot().report.devices)
        ]
        assert told[0][str(sim.device)] == told[1][str(sim.device)]
        ask_to_shrink(str(sim.device), 1)
        assert_exact(sim, report_on(model))
    del model
    gc.collect()
    assert sim.allocated_bytes == 0


def test_two_paged_models_have_rows_of_their_own(sim):
    models = {"Sequential": linears(8, 64), "a": linears(8, 32)}
    both = nn.ModuleDict({"a": models["a"]})
    handles = {
        "Sequential": page(models["Sequential"], sim.device, "17KiB", budget="60KiB"),
        "a": page(models["a"], sim.device, "5KiB", budget="20KiB"),
    }
    outputs = [models["Sequential"](torch.randn(2, 64)), models["a"](torch.randn(2, 32))]
    device = assert_exact(sim, report_on(both))
    rows = {row.name: row.n_bytes for row in device.rows if row.category.startswith("paged")}
    resident_bytes = 0
    for name, handle in handles.items():
        assert rows[f"{name}.ring"] == handle.report().ring_bytes
        resident_bytes += handle.report().resident_bytes
    assert device.categories["paged: resident"] == resident_bytes > 0
    kept = {unit.name for unit in handles["Sequential"].plan.units if unit.resident}
    assert {f"Sequential.{name}" for name in kept} <= rows.keys()
    handles["Sequential"].unpage()
    device = assert_exact(sim, report_on(both))
    assert device.categories["paged: ring"] == handles["a"].report().ring_bytes
    handles["a"].unpage()
    assert not any(name.startswith("paged") for name in report_on(both).categories)
    assert outputs


def test_on_the_host_a_parameter_lies_in_its_buffer_and_counts_once(sim):
    gc.collect()
    others = report_on(device="cpu").categories["parameters"]
    model = linears(8, 64)
    weights = weight_bytes(model)
    with page(model, sim.device, "17KiB", budget="60KiB") as handle:
        model(torch.randn(2, 64))
        report = report_on(model, device="cpu")
        units = sum(unit.n_bytes for unit in handle.plan.units)
        assert report.categories["paged: host"] == units >= weights
        assert report.categories["parameters"] == others
        rows = {row.name: row for row in report.rows}
        assert rows["3.weight"].counted_bytes == 0
        assert rows["3.weight"].category == "parameters"
        assert rows[rows["3.weight"].owner].category == "paged: host"
        assert sum(report.categories.values()) == report.total_bytes
        # memory that it is given counts beside the buffer until it is home
        model[3].weight.data = torch.ones(64, 64)
        report = report_on(model, device="cpu")
        assert report.categories["paged: host"] == units
        assert report.categories["parameters"] == others + model[3].weight.nbytes
        model(torch.randn(2, 64))
        report = report_on(model, device="cpu")
        assert report.categories["paged: host"] == units
        assert report.categories["parameters"] == others
    report = report_on(model, device="cpu")
    assert report.categories["parameters"] == others + weights
    assert report.unexplained_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_in_a_folder_names_its_ring_and_what_is_staged(sim, tmp_path, device):
    model = linears(8, 64)
    budget = int(weight_bytes(model) * 0.6) + 4096
    with page(model, device, budget=budget, host=tmp_path) as handle:
        model(torch.ones(2, 64))
        categories = report_on(model).categories
        report = handle.report()
    paged = {name: n for name, n in categories.items() if name.startswith("paged")}
    staged = {"paged: staging": report.staging_bytes} if device == "sim" else {}
    resident = {"paged: resident": report.resident_bytes}
    assert paged == {**resident, "paged: ring": report.ring_bytes, **staged}
