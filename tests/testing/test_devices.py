"""Two devices beside each other: what each has of its own, and what is current in a thread."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from tenure.testing import RaceError, Rates, for_each_allocation


@pytest.fixture
def two(sim):
    return sim(devices=2)


def test_each_device_has_a_memory_of_its_own(two):
    two(devices=2, budget=1000)
    first = torch.ones(10, device="sim:0")
    second = torch.ones(20, dtype=torch.float64, device="sim:1")
    assert (first.device, second.device) == (two.device, two.on(1).device)
    assert (two.allocated_bytes, two.on(1).allocated_bytes) == (40, 160)
    assert two.module.memory_allocated("sim:1") == torch.accelerator.memory_allocated(1) == 160
    assert two.module.mem_get_info(1) == (840, 1000)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^sim:1 out of memory\. .* sim:1 has a budget"
    ):
        torch.empty(1000, device="sim:1")
    assert (two.n_ooms, two.on(1).n_ooms) == (0, 1)
    two.on(1).budget_bytes = 160
    del first
    with pytest.raises(torch.OutOfMemoryError, match=r"^sim:1"):
        second + 1
    assert (two.allocated_bytes, two.peak_bytes, two.on(1).peak_bytes) == (0, 40, 160)


def test_a_failure_is_planted_on_the_device_that_it_is_planted_on(two):
    def step():
        x = torch.ones(4, device="sim:0") + 1
        return (x.to("sim:1") * 2).sum().item()

    seen = []
    assert for_each_allocation(step, lambda failure: seen.append(str(failure.error)), index=1) > 0
    assert all(text.startswith("sim:1 out of memory") for text in seen)


@pytest.mark.parametrize("index", [0, 1])
def test_what_names_no_index_means_the_current_device(two, index):
    module, here = two.module, torch.device("sim", index)
    with module.device(index):
        assert module.current_device() == torch.accelerator.current_device_index() == index
        made = [
            torch.zeros(2, device="sim"),
            torch.rand(2, device="sim"),
            torch.randperm(3, device="sim"),
            torch.ones(2).to("sim"),
            torch.ones(2).to(device=torch.device("sim"), dtype=torch.float64),
            torch.ones(2).sim(),
            nn.Linear(2, 2).to("sim").weight,
            torch.zeros(2, device=torch.device("sim", 1 - index)).to("sim"),
        ]
        assert [tensor.device for tensor in made] == [here] * len(made)
        assert module.Stream().device == module.current_stream().device == here
        assert module.memory_allocated() == module.memory_allocated(index)
    assert module.current_device() == 0
    with torch.accelerator.device_index(index):
        assert module.current_device() == index
    assert module.current_device() == 0


def test_the_accelerator_of_the_process_has_both(two):
    accelerator, x = torch.accelerator, torch.ones(1000, device="sim:1")
    assert accelerator.device_count() == 2
    assert accelerator.memory_stats(1) == dict(sorted(two.module.memory_stats(1).items()))
    assert accelerator.current_stream("sim:1") is two.module.current_stream(1)
    assert not two.module.current_stream(x.device).query()
    accelerator.synchronize(1)
    assert two.module.current_stream(1).query()
    accelerator.set_device_index(1)
    assert accelerator.memory_allocated() == x.nbytes


def test_a_thread_has_a_current_device_of_its_own(two):
    two.module.set_device(1)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(two.module.current_device).result() == 0
    assert two.module.current_device() == 1
    two(devices=2)
    assert two.module.current_device() == 0


def test_operators_run_where_their_tensors_lie(two):
    x = torch.arange(6.0, device="sim:1").view(2, 3)
    results = [x @ x.t(), x.sum(), x.sort().values, torch.zeros_like(x), x.new_ones(3), x.t()[1]]
    assert {result.device for result in results} == {torch.device("sim", 1)}
    assert two.allocated_bytes == two.launches("compute") == 0
    assert two.on(1).launches("compute") > 0
    assert two.contexts == {1}


def test_an_operator_with_tensors_on_two_devices_raises_as_cuda_does(two):
    here, there = torch.ones(2, 2), torch.ones(2, 2, device="sim:1")
    text = "Expected all tensors to be on the same device, but found at least two devices, "
    for mixed, devices in (
        (lambda x: x + there, "sim:0 and sim:1!"),
        (lambda x: x @ there, "sim:0 and sim:1!"),
        (lambda x: torch.cat([there, x]), "sim:1 and sim:0!"),
        (lambda x: x + there.sum(), "sim:0 and sim:1!"),
        (lambda _: here @ there, "sim:1 and cpu!"),
    ):
        with pytest.raises(RuntimeError, match=text + devices):
            mixed(here.to("sim:0"))


def test_a_copy_between_devices_keeps_its_values_and_orders_both_streams(two):
    source = torch.arange(1000.0, device="sim:0")
    copied = source.to("sim:1")
    source.zero_()
    assert copied.sum().item() == 499500
    assert source.copy_(copied).tolist() == copied.tolist()
    side = two.module.Stream("sim:1")
    copied.mul_(2)
    with two.module.stream(side), pytest.raises(RaceError, match="the default stream of device 1"):
        copied.add_(1)
    assert len(two.take_faults()) == 1


def test_a_kernel_is_launched_on_the_device_of_the_handle(two):
    two.on(1).launch_kernel(1.0)
    assert (two.busy_s("compute"), two.on(1).busy_s("compute")) == (0, 1)
    assert two.contexts == {1}


def test_a_module_moves_from_device_to_device_with_its_gradients(two):
    layer = nn.Linear(4, 4).to("sim:0")
    weight = layer.weight
    layer(torch.ones(4, device="sim:0")).sum().backward()
    expected = weight.grad.tolist()
    assert layer.to("sim:1").weight is weight
    assert weight.device == weight.grad.device == torch.device("sim", 1)
    assert weight.grad.tolist() == expected
    assert two.allocated_bytes == 0
    layer.cpu().to("sim:1")
    assert (weight.device, weight.grad.tolist()) == (torch.device("sim", 1), expected)


def test_storages_go_to_the_device_that_they_name(two):
    layer = nn.Linear(4, 4).to("sim:1")
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    for where in (None, "sim:0"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["weight"]
        assert (loaded.device, torch.equal(loaded.cpu(), layer.weight.cpu())) == (
            torch.device(where or "sim:1"),
            True,
        )
    assert copy.deepcopy(layer).weight.device == torch.device("sim", 1)
    assert from_dlpack(to_dlpack(layer.weight.detach())).device == torch.device("sim", 1)
    assert {segment["device"] for segment in two.module.memory_snapshot()} == {0, 1}


def test_a_backward_pass_crosses_devices(two):
    def run(*places):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).double().to(place) for place in places]
        x = torch.ones(2, 4, dtype=torch.float64)
        for layer, place in zip(layers, places, strict=True):
            x = x.to(place)
            x = layer(x).tanh() + x * x
        x.sum().backward()
        return [layer.weight.grad.cpu() for layer in layers]

    for expected, found in zip(run("cpu", "cpu"), run("sim:0", "sim:1"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert two.allocated_bytes == two.on(1).allocated_bytes == 0


def test_an_error_of_a_backward_pass_on_the_second_device_is_raised(two):
    def fail(grad):
        raise ValueError("in a hook")

    x = torch.ones(2, device="sim:1", requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ValueError, match="in a hook"):
        y.sum().backward()


def test_each_device_draws_numbers_of_its_own(two):
    torch.manual_seed(3)
    first, state = torch.rand(4, device="sim:0"), two.module.get_rng_state(1)
    second = torch.rand(4, device="sim:1")
    assert torch.equal(first.cpu(), second.cpu())  # all have one seed
    assert torch.equal(two.module.get_rng_state(0), two.module.get_rng_state(1))
    torch.rand(4, device="sim:1")
    two.module.set_rng_state(state, "sim:1")
    assert torch.equal(torch.rand(4, device="sim:1"), second)
    with two.module.device(1):
        two.module.manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim:1"), second)
    assert not torch.equal(torch.rand(4, device="sim:0").cpu(), first.cpu())


def test_fork_rng_leaves_the_states_of_all_devices(two):
    states = [two.module.get_rng_state(index) for index in (0, 1)]
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.rand(4, device="sim:0")
        torch.rand(4, device="sim:1")
    for index, state in enumerate(states):
        assert torch.equal(two.module.get_rng_state(index), state)


def test_an_index_that_is_not_there_is_refused(two):
    match = "invalid device ordinal: there is no sim:2; the simulated machine has sim:0 to sim:1"
    for use in (
        lambda: torch.ones(2, device="sim:2"),
        lambda: two.module.set_device(2),
        lambda: two.module.Stream(2),
        lambda: two.on(2),
    ):
        with pytest.raises(RuntimeError, match=match):
            use()


@pytest.mark.parametrize(
    "use",
    [
        lambda module: torch.ones(2, device="sim:1"),
        lambda module: torch.zeros(0, device="sim:1"),
        lambda module: module.Stream("sim:1"),
        lambda module: module.synchronize(1),
        lambda module: module.mem_get_info(1),
        lambda module: module.set_device(1),
        lambda module: module.device(1).__enter__(),
        lambda module: module.current_stream(1).query(),
        lambda module: module.current_stream(1).record_event(),
    ],
)
def test_the_first_use_of_a_device_makes_a_context_on_it_alone(two, use):
    assert two.contexts == set()
    use(two.module)
    assert two.contexts == {1}


def test_asking_for_figures_states_and_streams_makes_no_context(two):
    two.module.memory_stats(1)
    two.module.reset_peak_memory_stats(1)
    two.module.set_rng_state(two.module.get_rng_state(1), 1)
    torch.manual_seed(1)
    two.module.current_stream(1)
    two.module.empty_cache()
    two.module.memory_snapshot()
    with two.module.device(0):
        pass
    assert two.contexts == set()


def test_a_wait_for_an_event_makes_a_context_on_the_current_device(two):
    """The planted fault: the host waits for the second device while the first is current."""
    done = two.module.current_stream(1).record_event()
    with two.module.device(1):
        done.synchronize()
        assert done.query()
    assert two.contexts == {1}
    done.synchronize()
    assert two.contexts == {0, 1}


def test_leaving_a_stream_of_another_device_makes_a_context_on_the_current_one(two):
    """The planted fault: `torch.cuda.stream` leaves by turning to the device that was current."""
    side = two.module.Stream(1)
    with two.module.device(1), two.module.stream(side):
        pass
    assert two.contexts == {1}
    with two.module.stream(side):
        pass
    assert two.contexts == {0, 1}


def test_pinning_in_place_makes_a_context_on_the_current_device(two):
    """The planted fault: memory is pinned for the second device while the first is current."""
    host, runtime = torch.zeros(100), two.module.cudart()
    torch.zeros(1, device="sim:1")
    runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    assert two.contexts == {0, 1}
    two(devices=2)
    with two.module.device(1):
        runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        runtime.cudaHostUnregister(host.data_ptr())
    assert two.contexts == {1}


def test_pinned_allocations_take_a_context_that_is_there(two):
    torch.zeros(1, device="sim:1")
    torch.zeros(4).pin_memory()
    assert two.contexts == {1}
    two(devices=2)
    torch.zeros(4).pin_memory()
    assert two.contexts == {0}


def test_streams_belong_to_a_device_and_turn_their_thread_to_it(two):
    module = two.module
    side = module.Stream(1)
    with module.stream(side):
        assert module.current_device() == 1
        assert module.current_stream() is side
        assert module.current_stream(0) is module.default_stream(0)
    assert module.current_device() == 0
    assert module.current_stream(1) is module.default_stream(1)
    assert module.default_stream(0) is not module.default_stream(1)
    assert module.default_stream(0).stream_id == module.default_stream(1).stream_id == 0
    module.set_stream(side)
    assert (module.current_device(), module.current_stream("sim:1")) == (1, side)


def test_an_event_stays_with_the_device_where_it_was_recorded(two):
    event = two.module.Event()
    event.record()
    with (
        two.module.device(1),
        pytest.raises(
            RuntimeError, match="Event device 0 does not match recording stream's device 1"
        ),
    ):
        event.record()
    two.module.current_stream(1).wait_event(event)


def test_the_current_stream_of_the_wrong_device_orders_nothing(two):
    """The planted fault: an event is recorded where device 0 is current, the work is on 1."""
    x, side = torch.ones(4, device="sim:1"), two.module.Stream(1)
    done = two.module.Event()
    done.record()
    side.wait_event(done)
    with two.module.stream(side), pytest.raises(RaceError, match="RAW"):
        x.sum()
    right = two.module.current_stream(x.device).record_event()
    side.wait_event(right)
    with two.module.stream(side):
        assert x.sum().item() == 4
    assert len(two.take_faults()) == 1


def test_a_wait_for_one_device_leaves_the_work_of_the_other(two):
    slow, other = (torch.ones(1 << 16, device=f"sim:{index}") for index in (0, 1))
    for _ in range(50):
        slow.add_(1)
    two.module.synchronize(1)
    assert not two.module.current_stream(0).query()
    two.module.synchronize(0)
    assert two.module.current_stream(0).query()
    assert other.sum().item() == 1 << 16


def test_the_engines_of_two_devices_work_side_by_side(two):
    def finished_s(*indexes):
        two(devices=2, rates=Rates(memory_bytes_per_s=1e6))
        made = [torch.ones(1 << 10, device=f"sim:{index}") for index in indexes]
        begin_s = two.elapsed_s
        for x in made:
            x.add_(1)
        return two.elapsed_s - begin_s

    assert finished_s(0, 1) < 1.5 * finished_s(0) < finished_s(0, 0)


def test_the_number_of_a_stream_leads_to_that_of_its_device(two):
    module, side = two.module, two.module.Stream(1)
    assert module.ExternalStream(0, device=1) is module.default_stream(1)
    assert module.ExternalStream(side.stream_id, device="sim:1") is side
    with pytest.raises(RuntimeError, match=r"invalid resource handle: .* on sim:1> used on sim:0"):
        module.ExternalStream(side.stream_id)
