import pytest
import torch

from tenure.testing import Rates

MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
)


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, device: host + device,
        lambda host, device: torch.cat([host, device]),
        lambda host, device: device.add_(host),
        lambda host, device: host + device.sum(),
        lambda host, device: torch.std(device, (0, 1), out=host[0, 0]),
    ],
)
def test_mixing_devices_raises_as_on_cuda(sim, mix):
    with pytest.raises(RuntimeError, match=MIXED):
        mix(torch.ones(2, 2), torch.ones(2, 2, device=sim.device))


def test_a_number_of_the_host_may_take_part_and_an_argument_that_may_not_is_named(sim):
    x = torch.ones(2, device=sim.device)
    assert (torch.tensor(2.0) + x).tolist() == [3, 3]
    assert (x * torch.tensor(3)).device == sim.device
    assert (x.half().sum() * 2.5).dtype == torch.float16
    with pytest.raises(RuntimeError, match=r"checking argument mat2 in method aten::mm\)"):
        x[None].mm(torch.ones(2, 2))


def test_indices_may_lie_on_the_host_but_not_the_other_way_round(sim):
    x = torch.arange(4.0, device=sim.device)
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    x[torch.tensor([True, False, False, True])] = 9
    assert x.tolist() == [9, 1, 2, 9]
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.arange(4)[torch.tensor([1], device=sim.device)]


def test_in_place_operations_return_the_same_object_and_allocate_nothing(sim):
    x = torch.ones(4, device=sim.device)
    count, version = sim.n_allocations, x._version
    assert x.mul_(2) is x
    assert x.tolist() == [2, 2, 2, 2]
    assert sim.n_allocations == count
    assert x._version == version + 1


def test_results_that_share_memory_are_one_allocation(sim):
    x = torch.arange(6.0, device=sim.device)
    count = sim.n_allocations
    first, second = torch.ops.aten.split_with_sizes(x, [2, 4])
    assert sim.n_allocations == count
    first.fill_(0)
    assert x.tolist() == [0, 0, 2, 3, 4, 5]
    assert second.shape == (4,)


def test_reading_a_number_stops_the_host(sim):
    x = torch.ones(3, device=sim.device)
    waits = sim.host_waits
    assert x.sum().item() == 3
    assert bool(torch.equal(x, x))
    assert x.nonzero().shape == (3, 1)
    assert sim.host_waits == waits + 3


def test_a_matrix_product_takes_the_time_of_its_arithmetic_others_of_their_bytes(sim):
    sim(rates=Rates(flops_per_s=1000.0))
    x = torch.ones(10, 10, device=sim.device)
    before_s = sim.busy_s("compute")
    x @ x
    assert sim.busy_s("compute") - before_s == 2 * 10**3 / 1000.0
    sim(rates=Rates(memory_bytes_per_s=1000.0))
    x = torch.ones(1000, device=sim.device)
    before_s = sim.busy_s("compute")
    x.neg()
    assert sim.busy_s("compute") - before_s == 8000 / 1000.0


def test_running_statistics_stay_as_they_were_when_the_result_does_not_fit(sim):
    layer = torch.nn.BatchNorm1d(3).to(sim.device)
    x = torch.randn(5, 3, device=sim.device) + 5
    sim.fail_at(1)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        layer(x)
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert layer.running_var.tolist() == [1, 1, 1]
    layer(x)
    assert layer.running_mean.mean() > 0
