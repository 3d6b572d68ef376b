"""Paging to a device that is not the current one: no other device is touched."""

import pytest
import torch

from tenure.paging import PagingWarning, page, plan_paging
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


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_model_is_paged_to_the_second_device_alone(two, is_on_disk, tmp_path):
    model, args, kwargs = build("resnet")
    expected = model.to(THERE)(*(x.to(THERE) for x in args), **kwargs).cpu()
    model.cpu()
    two(devices=2)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    least_bytes = plan_paging(model, THERE).minimum_bytes
    budget, host = max(least_bytes, weight_bytes // 2), tmp_path if is_on_disk else "pinned"
    with page(model, THERE, budget=budget, host=host) as handle:
        for _ in range(3):
            assert torch.equal(model(*args, **kwargs).cpu(), expected)
        handle.report()
        ask_to_shrink("sim:1", 1)
        next(model.parameters()).mul_(1)
        assert torch.equal(model(*args, **kwargs).cpu(), expected)
    assert_untouched(two)
    assert two.on(1).allocated_bytes == 0


def test_memory_that_can_not_be_pinned_or_unpinned_leaves_the_first_device_alone(two, caplog):
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
