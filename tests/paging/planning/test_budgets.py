"""What paging takes counts for a memory budget: each byte once, and none of it beyond the limit."""

import copy

import pytest
import torch

from tenure.adaptive import memory_budget
from tenure.paging import page, plan_paging
from tests.shrinking import namers

from ..models import build, mlp
from ..test_zoo import assert_equal, percent_of_weights

pytestmark = pytest.mark.usefixtures("without_gradients")

OOM = torch.OutOfMemoryError


def named_bytes(device_type):
    """What all that is paged says that it keeps on a device."""
    named = [each for namer in namers.alive() for each in namer.named_tensors()]
    return sum(each.tensor.nbytes for each in named if each.tensor.device.type == device_type)


@pytest.mark.parametrize("name", ["lstm", "strided", "tied"])
def test_a_budget_counts_what_the_device_has_allocated(sim, name):
    model, args, kwargs = build(name)
    budget_bytes = percent_of_weights(model, sim.device, 60)
    with memory_budget("16MiB", sim.device) as budget:
        with page(model, sim.device, budget=2 * budget_bytes) as handle:
            taken_bytes = budget.live_bytes
            assert taken_bytes == sim.allocated_bytes == handle.plan.allocated_bytes
            for _ in range(2):
                output = model(*args, **kwargs)
                assert budget.live_bytes == sim.requested_bytes
            del output
            assert budget.live_bytes == taken_bytes
        assert budget.live_bytes == sim.allocated_bytes == 0
        assert budget.peak_bytes >= taken_bytes


@pytest.mark.parametrize("host", ["pinned", "disk"])
def test_what_is_counted_is_what_reports_name(sim, model, x, host, tmp_path):
    where = tmp_path if host == "disk" else host
    with memory_budget("1MiB", sim.device) as device, memory_budget("1MiB") as ours:
        with page(model, sim.device, budget="16KiB", host=where):
            model(x)
            assert device.live_bytes == sim.requested_bytes
            in_buffers = host != "disk"  # where the model's own memory was moved
            assert ours.live_bytes == (0 if in_buffers else named_bytes("cpu"))
        assert (device.live_bytes, ours.live_bytes) == (0, 0)


def test_a_model_that_is_made_in_the_block_counts_once_on_the_host_paged_and_unpaged(sim, x):
    with memory_budget("1MiB") as budget:
        model = mlp().eval()
        before_bytes = budget.live_bytes
        weight_bytes = plan_paging(model, sim.device).weight_bytes
        assert before_bytes == sum(each.nbytes for each in model.parameters())
        with page(model, sim.device, budget="16KiB"):
            assert before_bytes <= budget.live_bytes <= weight_bytes
            model(x)
            model[0].weight.data = model[0].weight.data * 2
            model(x)
            assert before_bytes <= budget.live_bytes <= weight_bytes
        assert before_bytes <= budget.live_bytes <= weight_bytes
        del model
        assert budget.live_bytes == 0


@pytest.mark.parametrize("host", ["pinned", "disk"])
def test_paging_beyond_the_limit_is_out_of_memory_and_leaves_all_as_before(
    sim, model, x, host, tmp_path
):
    expected = copy.deepcopy(model)(x)
    state = copy.deepcopy(model.state_dict())
    where = tmp_path if host == "disk" else host
    with memory_budget("15KiB", sim.device) as budget:
        with pytest.raises(
            OOM,
            match=r"^sim:0 out of memory. Tried to allocate .* in paged: (ring|resident). "
            r"memory_budget has a limit of 15.0 KiB",
        ):
            page(model, sim.device, budget="16KiB", host=where)
        assert budget.live_bytes == sim.allocated_bytes == 0
        assert_equal(model.state_dict(), state)
        with page(model, sim.device, budget="14KiB", host=where):
            assert budget.live_bytes == sim.allocated_bytes > 0
    assert torch.equal(model(x), expected)


def test_a_share_of_what_is_free_is_a_share_of_the_budget(tmp_path, model):
    with memory_budget("24KiB") as budget:
        kept = torch.ones(8 * 2**10, dtype=torch.uint8)
        with page(model, "cpu", budget="75%", host=tmp_path) as handle:
            assert handle.plan.budget_bytes == 12 * 2**10
            assert budget.live_bytes == len(kept) + handle.plan.allocated_bytes
