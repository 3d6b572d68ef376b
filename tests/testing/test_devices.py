"""The module of the device, two devices beside each other, and what is current in a thread."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tenure.testing import RaceError


def test_module_and_accelerator_answer_what_devices_are_asked(sim):
    module = torch.get_device_module(sim.device)
    assert module is torch.sim
    assert module.is_available()
    assert module.is_initialized()
    assert module.is_bf16_supported(including_emulation=False)
    assert module.get_device_name() == "simulated accelerator"
    with module.device(sim.device):
        assert module.current_device() == 0
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "sim"
    for each in (module, torch.accelerator):
        assert each.device_count() == 1
    for ask in (module.set_device, module.memory_stats, module.device):
        with pytest.raises(ValueError, match="Expected a sim device, but got: cpu"):
            ask("cpu")


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
            nn.Linear(2, 2).sim().weight,
            torch.zeros(2, device=torch.device("sim", 1 - index)).to("sim"),
        ]
        assert [tensor.device for tensor in made] == [here] * len(made)
        assert all(tensor.is_sim for tensor in made)
        assert module.Stream().device == module.current_stream().device == here
        assert module.memory_allocated() == module.memory_allocated(index)
    assert module.current_device() == 0
    with torch.accelerator.device_index(index):
        assert module.current_device() == index
    assert module.current_device() == 0


def test_operators_run_where_their_tensors_lie(two):
    x = torch.arange(6.0, device="sim:1").view(2, 3)
    results = [x @ x.t(), x.sum(), x.sort().values, torch.zeros_like(x), x.new_ones(3), x.t()[1]]
    assert {result.device for result in results} == {torch.device("sim", 1)}
    assert two.allocated_bytes == two.launches("compute") == 0
    assert two.on(1).launches("compute") > 0
    assert two.contexts == {1}


def test_a_copy_between_devices_keeps_its_values_and_orders_both_streams(two):
    source = torch.arange(1000.0, device="sim:0")
    copied = source.to("sim:1")
    source.zero_()
    assert copied.sum().item() == 499500
    assert source.copy_(copied).tolist() == copied.tolist()
    copied.mul_(2)
    match = "the default stream of device 1"
    with two.module.stream(two.module.Stream("sim:1")), pytest.raises(RaceError, match=match):
        copied.add_(1)
    assert len(two.take_faults()) == 1


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
    two(devices=1)
    with pytest.raises(RuntimeError, match="no sim:1; the simulated machine has one device, sim:0"):
        torch.ones(1).to("sim:1")


def leave_a_stream(module):
    with module.stream(module.Stream(1)):
        pass


def pin_in_place(module):
    torch.zeros(1, device="sim:1")
    host = torch.zeros(100)
    module.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    module.cudart().cudaHostUnregister(host.data_ptr())


def ask(module):
    module.memory_stats(1)
    module.reset_peak_memory_stats(1)
    module.set_rng_state(module.get_rng_state(1), 1)
    torch.manual_seed(1)
    module.current_stream(1)
    module.empty_cache()
    module.memory_snapshot()


@pytest.mark.parametrize(
    ("use", "contexts"),
    [
        (ask, set()),
        (lambda module: torch.zeros(0, device="sim:1"), {1}),
        (lambda module: module.mem_get_info(1), {1}),
        (lambda module: module.current_stream(1).query(), {1}),
        (lambda module: torch.zeros(4).pin_memory(), {0}),
        (lambda module: (torch.zeros(1, device="sim:1"), torch.zeros(4).pin_memory()), {1}),
        # the faults of programs: the first device is current where they wait, leave or pin
        (lambda module: module.current_stream(1).record_event().synchronize(), {0, 1}),
        (leave_a_stream, {0, 1}),
        (pin_in_place, {0, 1}),
    ],
)
def test_the_first_use_of_a_device_makes_a_context_on_it_alone(two, use, contexts):
    assert two.contexts == set()
    use(two.module)
    assert two.contexts == contexts
    if contexts == {0, 1}:
        two(devices=2)
        with two.module.device(1):
            use(two.module)
        assert two.contexts == {1}


def test_streams_belong_to_a_device_and_turn_their_thread_to_it(two):
    module, side = two.module, two.module.Stream(1)
    first, second = module.default_stream(0), module.default_stream(1)
    assert first is not second
    assert first.stream_id == second.stream_id == 0
    with module.stream(side):
        assert (module.current_device(), module.current_stream()) == (1, side)
        assert module.current_stream(0) is first
    assert module.current_device() == 0
    assert module.current_stream(1) is second
    module.set_stream(side)
    assert (module.current_device(), module.current_stream("sim:1")) == (1, side)


def test_the_current_stream_of_the_wrong_device_orders_nothing(two):
    """The planted fault: an event is recorded where device 0 is current, the work is on 1."""
    x, side = torch.ones(4, device="sim:1"), two.module.Stream(1)
    side.wait_event(two.module.current_stream().record_event())
    with two.module.stream(side), pytest.raises(RaceError, match="RAW"):
        x.sum()
    side.wait_event(two.module.current_stream(x.device).record_event())
    with two.module.stream(side):
        assert x.sum().item() == 4
    assert len(two.take_faults()) == 1


class Doubled(list):
    """Samples that are made on a device, in whatever process asks."""

    def __getitem__(self, index):
        return (super().__getitem__(index).to("sim") * 2).cpu()


def in_a_fork(run):
    """Whether `run` gives True in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(not run())
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_may_use_the_device_if_its_parent_has_not_and_a_worker_is_told(sim):
    assert in_a_fork(lambda: torch.ones(3, device=sim.device).tolist() == [1, 1, 1])
    held = torch.ones(4, device=sim.device)
    assert in_a_fork(lambda: sim.module._is_in_bad_fork() and torch.manual_seed(3) is not None)
    assert not sim.module._is_in_bad_fork()
    loader = DataLoader(Doubled([held, held]), num_workers=1, multiprocessing_context="fork")
    match = r"Cannot re-initialize sim in forked subprocess.*'spawn' start method"
    with pytest.raises(RuntimeError, match=match):
        next(iter(loader))
    assert held.sum().item() == 4  # the parent goes on
