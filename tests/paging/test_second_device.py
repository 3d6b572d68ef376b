"""Paging to a device that is not the current one: no other device is touched."""

import gc

import pytest
import torch

from tenure.paging import PagingWarning, chunk, page, plan_paging
from tests.shrinking import ask_to_shrink

from .models import build, mlp

pytestmark = pytest.mark.usefixtures("without_gradients")
THERE = "sim:1"


@pytest.fixture
def two(sim):
    """Two devices, of which the first is the current one."""
    return sim(devices=2)


def assert_untouched(sim):
    assert sim.contexts == {1}
    assert sim.on(0).n_allocations == 0
    assert sim.module.current_device() == 0


@pytest.mark.parametrize("name", ["mlp", "resnet", "tied", "functional", "unet"])
def test_a_model_is_paged_to_the_second_device_alone(two, name):
    model, args, kwargs = build(name)
    expected = model.to(THERE)(*(x.to(THERE) for x in args), **kwargs).cpu()
    model.cpu()
    two(devices=2)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    least_bytes = plan_paging(model, THERE).minimum_bytes
    with page(model, THERE, budget=max(least_bytes, weight_bytes // 2)) as handle:
        for _ in range(3):
            assert torch.equal(model(*args, **kwargs).cpu(), expected)
        handle.report()
        ask_to_shrink("sim:1", 1)
        next(model.parameters()).mul_(1)
        assert torch.equal(model(*args, **kwargs).cpu(), expected)
    assert_untouched(two)
    assert two.on(1).allocated_bytes == 0


def test_a_budget_in_percent_asks_the_second_device(two):
    model = mlp().eval()
    two.on(1).budget_bytes = "4MiB"
    plan = plan_paging(model, THERE, budget="50%")
    assert plan.budget_bytes == 2 << 20
    assert_untouched(two)


def test_a_model_passes_from_a_disk_to_the_second_device_alone(two, tmp_path, x):
    model = mlp().eval()
    expected = model.to(THERE)(x.to(THERE)).cpu()
    model.cpu()
    two(devices=2)
    with page(model, THERE, budget="12KiB", host=tmp_path) as handle:
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
        handle.report()
    assert_untouched(two)


def test_a_model_in_chunks_takes_the_second_device_alone(two, x):
    model = mlp().eval()
    with chunk(model, THERE, "10KiB"):
        model(x)
    assert_untouched(two)


def test_memory_that_can_not_be_pinned_or_unpinned_leaves_the_first_device_alone(two, x, caplog):
    model = mlp().eval()
    two(devices=2, fail_pinning=3)
    with pytest.warns(PagingWarning, match="could not be pinned"):
        handle = page(model, THERE)
    with two.module.device(THERE):
        two.module.cudart().cudaHostUnregister(model[0].weight.data_ptr())
    handle.unpage()
    assert "could not be unpinned on sim:1" in caplog.text
    assert_untouched(two)
    torch.ones(1, device=two.device).add_(1)
    torch.ones(1, device=THERE).add_(1)


def test_a_model_that_is_garbage_leaves_the_first_device_alone(two, x):
    model = mlp().eval()
    page(model, THERE)
    model(x)
    del model
    gc.collect()
    assert_untouched(two)
    assert two.on(1).allocated_bytes == 0


def test_what_is_current_on_the_second_device_computes(two, x):
    model = mlp().eval()
    stream = two.module.Stream(THERE)
    x = x.to(THERE)
    stream.wait_stream(two.module.current_stream(THERE))
    with page(model, THERE, budget="12KiB"):
        with two.module.device(THERE), two.module.stream(stream):
            y = model(x)
        two.module.current_stream(THERE).wait_stream(stream)
        assert torch.equal(model(x), y)
    assert_untouched(two)


def test_each_of_two_models_keeps_to_its_device(two, x):
    models, devices = [mlp().eval(), mlp().eval()], ["sim:0", THERE]
    expected = [model.to(d)(x.to(d)).cpu() for model, d in zip(models, devices, strict=True)]
    for model in models:
        model.cpu()
    two(devices=2)
    handles = [page(m, d, budget="12KiB") for m, d in zip(models, devices, strict=True)]
    for index in (0, 1, 0):
        with two.module.device(1 - index):
            for model, y in zip(models, expected, strict=True):
                assert torch.equal(model(x).cpu(), y)
    for index, handle in enumerate(handles):
        assert 0 < two.on(index).allocated_bytes <= handle.plan.budget_bytes
        handle.unpage()
        assert two.on(index).allocated_bytes == 0


@pytest.mark.filterwarnings("ignore:.*could not be pinned:tenure.paging.PagingWarning")
@pytest.mark.parametrize("which", [None, 3, "all"])
def test_weights_are_right_pinned_or_not(two, x, which):
    model = mlp().eval()
    expected = model.to(THERE)(x.to(THERE)).cpu()
    model.cpu()
    two(devices=2, fail_pinning=which)
    with page(model, THERE, budget="12KiB") as handle:
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
        handle.report()
    assert_untouched(two)
