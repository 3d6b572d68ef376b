"""Paging to a device that is not the current one: no other device is touched."""

import pytest
import torch

from tenure.paging import PagingWarning, page
from tests.shrinking import ask_to_shrink

from .models import build, mlp
from .support import percent_of_weights, whole_output

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
    expected = whole_output(THERE, model, *args, **kwargs)
    two(devices=2)
    host = tmp_path if is_on_disk else "pinned"
    budget = percent_of_weights(model, THERE, 50, host)
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
