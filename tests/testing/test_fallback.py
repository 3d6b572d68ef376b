import pytest
import torch

from tenure.testing import RaceError, Rates

MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
)


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, device: host + device,
        lambda host, device: device + host,
        lambda host, device: device @ host,
        lambda host, device: torch.cat([host, device]),
        lambda host, device: torch.nn.functional.linear(device, host),
        lambda host, device: device.add_(host),
        lambda host, device: host + device.sum(),
        lambda host, device: host.sum().add_(device.sum()),
        lambda host, device: torch.where(device > 0, host, device),
        lambda host, device: torch.std(device, (0, 1), out=host[0, 0]),
    ],
)
def test_mixing_devices_raises_as_on_cuda(sim, mix):
    with pytest.raises(RuntimeError, match=MIXED):
        mix(torch.ones(2, 2), torch.ones(2, 2, device=sim.device))


def test_the_error_names_the_argument(sim):
    with pytest.raises(RuntimeError, match=r"checking argument mat2 in method aten::mm\)"):
        torch.ones(2, 2, device=sim.device).mm(torch.ones(2, 2))


def test_a_host_number_may_take_part(sim):
    x = torch.ones(2, device=sim.device)
    assert (torch.tensor(2.0) + x).tolist() == [3, 3]
    assert (x * torch.tensor(3)).device == sim.device


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


def test_numbers_in_place_of_tensors_promote_as_on_the_cpu(sim):
    x = torch.tensor([5, 7])
    assert torch.equal(torch.remainder(x.to(sim.device), 4).cpu(), x % 4)
    half = torch.tensor(2.0, dtype=torch.float16, device=sim.device)
    assert (half * 2.5).dtype == torch.float16


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


def test_a_matrix_product_takes_the_time_of_its_arithmetic(sim):
    sim(rates=Rates(flops_per_s=1000.0))
    x = torch.ones(10, 10, device=sim.device)
    before_s = sim.busy_s("compute")
    x @ x
    assert sim.busy_s("compute") - before_s == 2 * 10**3 / 1000.0


def test_other_operations_take_the_time_of_their_bytes(sim):
    sim(rates=Rates(memory_bytes_per_s=1000.0))
    x = torch.ones(1000, device=sim.device)
    before_s = sim.busy_s("compute")
    x.neg()
    assert sim.busy_s("compute") - before_s == 8000 / 1000.0


def test_the_same_program_takes_the_same_virtual_time(sim):
    def run():
        sim()
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 16).to(sim.device)
        layer(torch.randn(4, 16, device=sim.device)).sum().backward()
        sim.module.synchronize()
        return sim.elapsed_s, sim.peak_bytes, sim.n_allocations

    assert run() == run()


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


def test_running_statistics_are_written_in_training_and_read_in_evaluation(sim):
    layer = torch.nn.BatchNorm1d(3).to(sim.device)
    x = torch.randn(5, 3, device=sim.device)
    side = sim.module.Stream()
    side.wait_stream(sim.module.current_stream())
    layer.eval()(x)
    with sim.module.stream(side):
        layer(x)
    side.synchronize()
    layer.train()(x)
    with sim.module.stream(side), pytest.raises(RaceError, match="RAW"):
        layer.running_mean.sum()
    assert len(sim.take_faults()) == 1


def test_an_older_view_of_a_grown_tensor_allocates_nothing_when_it_is_used(sim):
    x = torch.arange(4.0, device=sim.device)
    view = x[:2]
    x.resize_(8)
    count, n_bytes = sim.n_allocations, sim.allocated_bytes
    view.add_(1)
    assert (sim.n_allocations, sim.allocated_bytes) == (count, n_bytes)
    assert view.tolist() == [1, 2]


def test_an_argument_that_could_not_grow_is_used_and_grown_as_before(sim):
    out = torch.zeros(2, device=sim.device)
    x = torch.ones(100, device=sim.device)
    sim.fail_at(1)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        out.resize_(100)
    count = sim.n_allocations
    assert out.add_(1).tolist() == [1, 1]
    assert sim.n_allocations == count
    out.resize_(3)
    assert sim.allocated_bytes == x.nbytes + 12
