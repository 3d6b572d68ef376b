"""What paging takes counts for a memory budget: each byte once, and none of it beyond the limit."""

import copy

import pytest
import torch

from tenure.adaptive import memory_budget
from tenure.paging import page
from tests.shrinking import namers

from ..models import build, mlp
from ..support import assert_equal, percent_of_weights, weight_bytes

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(params=["pinned", "disk"])
def host(request, tmp_path):
    return tmp_path if request.param == "disk" else "pinned"


def named_bytes(device_type):
    """What all that is paged says that it keeps on a device."""
    named = [each for namer in namers.alive() for each in namer.named_tensors()]
    return sum(each.tensor.nbytes for each in named if each.tensor.device.type == device_type)


@pytest.mark.parametrize("name", ["lstm", "strided", "tied"])
def test_a_budget_counts_what_the_device_has_allocated_and_reports_name(sim, name, host):
    model, args, kwargs = build(name)
    budget_bytes = 2 * percent_of_weights(model, sim.device, 60, host)
    with memory_budget("16MiB", sim.device) as budget, memory_budget("16MiB") as ours:
        with page(model, sim.device, budget=budget_bytes, host=host) as handle:
            taken_bytes = budget.live_bytes
            assert taken_bytes == sim.allocated_bytes == handle.plan.allocated_bytes
            for _ in range(2):
                output = model(*args, **kwargs)
                assert budget.live_bytes == sim.requested_bytes
            del output
            assert budget.live_bytes == taken_bytes
            in_buffers = host == "pinned"  # where the model's own memory was moved
            assert ours.live_bytes == (0 if in_buffers else named_bytes("cpu"))
        assert (budget.live_bytes, ours.live_bytes, sim.allocated_bytes) == (0, 0, 0)
        assert budget.peak_bytes >= taken_bytes


def test_a_model_that_is_made_in_the_block_counts_once_on_the_host_paged_and_unpaged(sim, x):
    with memory_budget("1MiB") as budget:
        model = mlp().eval()
        before_bytes = budget.live_bytes
        assert before_bytes == weight_bytes(model)
        with page(model, sim.device, budget="16KiB") as handle:
            most_bytes = handle.plan.weight_bytes
            assert before_bytes <= budget.live_bytes <= most_bytes
            model(x)
            model[0].weight.data = model[0].weight.data * 2
            model(x)
            assert before_bytes <= budget.live_bytes <= most_bytes
        assert before_bytes <= budget.live_bytes <= most_bytes
        del model, handle
        assert budget.live_bytes == 0


def test_paging_beyond_the_limit_is_out_of_memory_and_leaves_all_as_before(sim, model, x, host):
    expected, state = copy.deepcopy(model)(x), copy.deepcopy(model.state_dict())
    told = (
        r"^sim:0 out of memory. Tried to allocate .* in paged: (ring|resident). "
        r"memory_budget has a limit of 15.0 KiB"
    )
    with memory_budget("15KiB", sim.device) as budget:
        with pytest.raises(torch.OutOfMemoryError, match=told):
            page(model, sim.device, budget="16KiB", host=host)
        assert budget.live_bytes == sim.allocated_bytes == 0
        assert_equal(model.state_dict(), state)
        with page(model, sim.device, budget="14KiB", host=host):
            assert budget.live_bytes == sim.allocated_bytes > 0
    assert torch.equal(model(x), expected)


def test_a_share_of_what_is_free_is_a_share_of_the_budget(tmp_path, model):
    with memory_budget("24KiB") as budget:
        kept = torch.ones(8 * 2**10, dtype=torch.uint8)
        with page(model, "cpu", budget="75%", host=tmp_path) as handle:
            assert handle.plan.budget_bytes == 12 * 2**10
            assert budget.live_bytes == len(kept) + handle.plan.allocated_bytes
