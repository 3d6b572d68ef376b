"""What a prediction says of an accelerator is what the simulated one then counts."""

from functools import partial

import pytest
import torch
from torch import nn

from tenure.adaptive import PredictionError, predict_peak
from tests.true_peak import step_of

from ..step.step_cases import squares
from .networks import layer, mlp, wide


def assert_takes(sim, report, fn, batch, optimizer):
    """A step takes of the device what the report says."""
    sim.module.reset_peak_memory_stats()
    kept = step_of(fn, batch, optimizer)()
    stats = sim.module.memory_stats()
    counted = [stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")]
    assert counted == [report.peak_bytes, report.allocated_bytes, report.reserved_bytes]
    assert report.device == str(sim.device)
    del kept


@pytest.mark.sim_allocator("cuda")
@pytest.mark.parametrize(
    ("make", "shape", "optimizer"),
    [
        (wide, (4, 700), torch.optim.AdamW),
        (wide, (4, 700), partial(torch.optim.AdamW, foreach=False)),
        (layer, (8, 32, 64), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        pytest.param(mlp, (20_000, 64), None, marks=pytest.mark.exhaustive),
        pytest.param(layer, (16, 400, 64), torch.optim.RMSprop, marks=pytest.mark.exhaustive),
    ],
    ids=["wide", "one by one", "transformer", "large batch", "long sequences"],
)
def test_a_step_takes_of_an_accelerator_what_was_predicted(sim, make, shape, optimizer):
    model = make().to(sim.device)
    batch = torch.randn(shape).to(sim.device)
    stepped = optimizer and optimizer(model.parameters())
    report = predict_peak(squares(model), batch, optimizer=stepped)
    assert sim.peak_bytes == sim.allocated_bytes
    assert not report.approximate
    assert_takes(sim, report, squares(model), batch, stepped)
    # and a later one, with the state that is there
    model.zero_grad()
    report = predict_peak(squares(model), batch, optimizer=stepped)
    assert_takes(sim, report, squares(model), batch, stepped)


@pytest.mark.sim_allocator("exact")
def test_state_of_an_optimizer_that_the_work_steps_itself_is_there_in_later_steps(sim):
    model, batch = mlp().to(sim.device), torch.randn(512, 64).to(sim.device)
    optimizers = {"main": torch.optim.Adam(model.parameters())}

    def train(x):
        model(x).square().mean().backward()
        for each in optimizers.values():
            each.step()
            each.zero_grad()

    def true_peak():
        sim.module.reset_peak_memory_stats()
        train(batch)
        return sim.peak_bytes

    report = predict_peak(train, batch)
    assert [report.peak_bytes, report.later_peak_bytes] == [true_peak(), true_peak()]
    report = predict_peak(train, batch)
    assert report.later_peak_bytes is None
    assert report.peak_bytes == true_peak()


@pytest.mark.sim_allocator("cuda")
def test_a_model_on_the_host_is_predicted_as_if_it_were_there(sim):
    model, batch = mlp(), torch.randn(512, 64)
    model[0].weight.grad = torch.ones(256, 64)
    stepped = torch.optim.AdamW(model.parameters())
    report = predict_peak(squares(model), batch.to("meta"), optimizer=stepped, device="sim")
    assert sim.peak_bytes == 0
    there = [each for p in model.parameters() for each in (p, p.data)]
    assert {each.device.type for each in (*there, model[0].weight.grad)} == {"cpu"}
    model.to(sim.device)
    stepped = torch.optim.AdamW(model.parameters())
    assert_takes(sim, report, squares(model), batch.to(sim.device), stepped)


@pytest.mark.sim_allocator("cuda")
def test_of_several_devices_the_one_that_is_named_is_told(sim):
    sim(devices=2)
    first, second = nn.Linear(64, 256).to("sim:0"), nn.Linear(256, 8).to("sim:1")

    def fn(x):
        return second(first(x.to("sim:0")).to("sim:1")).square().mean()

    batch = torch.randn(512, 64)
    reports = [predict_peak(fn, batch, device=name) for name in (None, "sim", "sim:0", "sim:1")]
    kept = step_of(fn, batch, None)()
    true_bytes = [sim.module.memory_stats(i)["requested_bytes.all.peak"] for i in range(2)]
    assert [each.device for each in reports] == ["sim:0", "sim:0", "sim:0", "sim:1"]
    assert [each.peak_bytes for each in reports] == [*true_bytes[:1] * 3, true_bytes[1]]
    del kept


@pytest.mark.sim_allocator("cuda")
def test_what_is_said_to_fit_fits_to_the_segment(sim):
    shapes = [(6_000, 700), (5_000, 700)]

    def fn(*parts):
        return sum(part.exp().exp().sum() for part in parts)

    parts = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        report = predict_peak(fn, *parts, device="sim")
    step_bytes = 2 * 2**20
    least = next(
        n_bytes for n_bytes in range(0, report.needed_bytes + 1, step_bytes) if report.fits(n_bytes)
    )
    assert least < report.needed_bytes
    assert "once the allocator gives back what it caches" in str(report.against(least))
    assert "It does not fit in" in str(report.against(least - step_bytes))
    for n_bytes in (least, least - step_bytes):
        del parts
        sim(allocator="cuda", budget=n_bytes)
        parts = [torch.zeros(shape, device=sim.device) for shape in shapes]
        with torch.no_grad():
            if n_bytes == least:
                fn(*parts)
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    fn(*parts)


@pytest.mark.sim_allocator("cuda")
def test_kernels_of_which_nothing_is_known_get_an_allowance(sim):
    conv = nn.Conv1d(64, 8, 3).to(sim.device)
    batch = torch.randn(8, 64, 32, device=sim.device)
    report = predict_peak(squares(conv), batch)
    # what the backward pass reads and writes: three gradients, the batch and the weight
    n_given = 8 * 8 * 30 + 8 * 64 * 32 + 8 * 64 * 3
    assert report.allowance_bytes == 4 * (n_given + 8 * 64 * 3 + 8)
    assert report.approximate
    assert report.reasons == ("the memory inside convolutions is estimated",)
    step_of(squares(conv), batch, None)()
    assert report.reserved_bytes + report.allowance_bytes >= sim.reserved_bytes


def test_on_a_machine_without_cuda_the_figures_are_those_of_cuda():
    model, batch = wide(), torch.randn(4, 700)
    stepped = torch.optim.AdamW(model.parameters())
    report = predict_peak(squares(model), batch, optimizer=stepped, device="cuda")
    one_by_one = torch.optim.AdamW(model.parameters(), foreach=False)
    less = predict_peak(squares(model), batch, optimizer=one_by_one, device="cuda")
    n_parameter_bytes = sum(p.nbytes for p in model.parameters())
    assert report.device == "cuda"
    assert report.phase == "optimizer step"
    # of all parameters at once, a temporary each
    assert report.peak_bytes - less.peak_bytes > 0.7 * n_parameter_bytes
    assert report.allocated_bytes >= report.peak_bytes
    assert report.reserved_bytes >= report.allocated_bytes
    assert report.reserved_bytes % (2 * 2**20) == 0
    # cuBLAS keeps one workspace for each of the two threads, reductions get a small segment
    assert report.allowance_bytes == 2 * 32 * 2**20 + 2 * 2**20
    assert report.approximate
    assert report.reasons == (
        "without cuda here, the kernels are the CPU's",
        "cuBLAS keeps workspaces of 64.0 MiB at most",
    )
    assert stepped.param_groups[0]["foreach"] is None


def test_work_that_names_a_device_which_is_not_here_runs():
    model, batch = mlp(), torch.randn(512, 64)

    def fn(x):
        noise = torch.ones(512, 64, device="cuda", requires_grad=True)
        return model(x.to("cuda:1") * noise).square().mean()

    report = predict_peak(fn, batch, device="cuda")
    assert report.baseline_bytes == batch.nbytes + sum(p.nbytes for p in model.parameters())
    assert report.categories["activations"] >= 2 * batch.nbytes


def test_a_device_that_is_not_here_has_to_be_asked_for():
    with pytest.raises(PredictionError, match=r'makes a tensor on cuda.*Pass device="cuda"'):
        predict_peak(lambda: torch.ones(4, device="cuda", requires_grad=True))


def test_work_that_is_elsewhere_is_not_predicted_for_another_device(sim):
    x = torch.ones(4, device=sim.device)
    with pytest.raises(PredictionError, match="are on sim:0, and device= names cuda"):
        predict_peak(torch.exp, x, device="cuda")


@pytest.mark.parametrize("kind", ["in place", "inner"])
def test_compiled_code_is_said_to_be_only_predicted_as_it_is_written(kind):
    model, batch = mlp(), torch.randn(512, 64)
    plain = predict_peak(squares(model), batch, device="cpu")
    if kind == "in place":
        model[0].compile(backend="eager")
        fn = squares(model)
    else:
        doubled = torch.compile(lambda x: x * 1.0, backend="eager")
        fn = lambda x: model(doubled(x)).square().mean()  # noqa: E731
    report = predict_peak(fn, batch)
    assert (
        "compiled code is predicted as it is written, and may take more or less" in report.reasons
    )
    assert report.approximate
    assert report.peak_bytes >= plain.peak_bytes
