import doctest
import inspect
import sys

import pytest
import torch

from tenure.testing import (
    RaceError,
    Rates,
    Simulator,
    SimulatorUsageError,
    for_each_allocation,
    simulated_accelerator,
)
from tests.programs import run_program

pytestmark = pytest.mark.simdevice


@pytest.mark.slow
def test_importing_it_changes_nothing_in_torch_and_the_first_block_does():
    done = run_program(
        """
import sys
import torch

def state():
    held = torch, torch._C, torch.autograd, torch.Tensor, torch.UntypedStorage
    return torch._C._get_privateuse1_backend_name(), [dict(vars(each)) for each in held]

before, modules = state(), set(sys.modules)
import tenure.testing
assert state() == before
assert not [name for name in set(sys.modules) - modules if name.startswith("torch")]
with tenure.testing.simulated_accelerator() as sim:
    print(torch.ones(2, device=sim.device).device)
assert state() != before
        """,
        has_tenure=False,
    )
    assert (done.stdout, done.returncode) == ("sim:0\n", 0), done.stderr


@pytest.mark.slow
def test_backward_passes_run_though_autograd_started_before_the_device_and_the_first_is_traced():
    done = run_program(
        """
import torch
from tenure.testing import simulated_accelerator
w = torch.ones(2, requires_grad=True)
w.sum().backward()
with simulated_accelerator():
    # as torch.compile does while it traces
    with torch.autograd.set_multithreading_enabled(False):
        w.sum().backward()
    w.sum().backward()
print(w.grad.tolist())
        """
    )
    assert (done.stdout, done.returncode) == ("[3.0, 3.0]\n", 0), done.stderr


@pytest.mark.slow
def test_a_process_whose_privateuse1_has_a_name_is_refused_by_that_name():
    done = run_program(
        """
import torch
torch.utils.rename_privateuse1_backend("npu")
from tenure.testing import SimulatorUsageError, simulated_accelerator
for _ in range(2):
    try:
        simulated_accelerator().__enter__()
    except SimulatorUsageError as error:
        print(error)
        """,
        has_tenure=False,
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("torch's PrivateUse1 backend is 'npu' in this process already, and")
    assert "run its tests in a process of their own, in which nothing sets up 'npu'." in first


def test_the_options_are_those_of_the_simulator_and_are_checked_there():
    declared = list(inspect.signature(Simulator.__call__).parameters.values())[1:]
    assert list(inspect.signature(simulated_accelerator).parameters.values()) == declared
    with simulated_accelerator(budget="1KiB", rates=Rates(copy_latency_s=1.0), fail_at=3) as sim:
        assert (sim.budget_bytes, sim.rates.copy_latency_s) == (1024, 1.0)
        x = torch.ones(100, device=sim.device)
    # figures and budget outlive the block, which the planted failure does not
    with pytest.raises(torch.OutOfMemoryError, match="budget of 1024 bytes"):
        torch.ones(400, device=sim.device)
    assert sim.peak_bytes == x.nbytes


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("devices", 0, "a whole number, 1 or more"),
        ("devices", True, "a whole number, 1 or more"),
        ("round_to_bytes", 1.5, "a whole number, 1 or more"),
        ("fail_pinning", 0, 'give "all", a size'),
        ("fail_at", -1, "are counted from 1"),
        ("detect_races", None, "True or False"),
        ("rates", 5, r"give Rates\(\.\.\.\)"),
        ("round_to_bytes", 256, r'allocator="cuda" .* 512 bytes'),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name_and_changes_nothing(
    sim, option, value, match
):
    x = torch.ones(100, device=sim.device)
    options = {"allocator": "cuda"} if value == 256 else {}
    with pytest.raises(ValueError, match=f"{option}={value!r}: .*{match}"):
        sim(**options, **{option: value})
    with pytest.raises(ValueError, match="there is no allocator 'cudaMallocAsync'; there are"):
        sim(allocator="cudaMallocAsync")
    with pytest.raises(TypeError, match="unexpected keyword argument 'bugdet'"):
        simulated_accelerator(bugdet=1)
    assert sim.allocated_bytes == x.nbytes


def test_a_block_in_a_block_is_refused_and_the_outer_one_goes_on(sim):
    x = torch.ones(2, device=sim.device)
    with (
        pytest.raises(SimulatorUsageError, match=r"running already, .* call what it gave to start"),
        simulated_accelerator(),
    ):
        pytest.fail("it ran")
    assert sim.allocated_bytes == x.nbytes
    assert for_each_allocation(lambda: x + 1) == 1


def _leave_a_race(end=lambda sim: None):
    with simulated_accelerator() as sim:
        x = torch.ones(4).pin_memory()
        x.to(sim.device, non_blocking=True)
        x.fill_(2)
        end(sim)


def _fail(sim):
    with pytest.raises(RaceError):
        sim.module.synchronize()
    raise KeyError("the block's own")


def test_a_race_that_is_not_taken_is_raised_at_the_end_or_told_of_an_error_of_the_block():
    with pytest.raises(RaceError, match=r"^host overwrite"):
        _leave_a_race()
    with pytest.raises(KeyError) as caught:
        _leave_a_race(_fail)
    [note] = caught.value.__notes__
    assert note.startswith("The simulated accelerator found races before this:\nhost overwrite")
    with simulated_accelerator() as sim:
        assert sim.faults == []


def test_a_sweep_without_a_simulator_says_what_to_do():
    with simulated_accelerator() as sim:
        pass
    match = r"^for_each_allocation\(\) found no simulated accelerator that runs.*inside `with simul"
    with pytest.raises(SimulatorUsageError, match=match):
        for_each_allocation(lambda: torch.ones(1, device=sim.device))


@pytest.mark.parametrize("shown", [simulated_accelerator, for_each_allocation, Simulator, Rates])
def test_the_example_of_a_docstring_runs(shown):
    found = doctest.DocTestParser().get_doctest(
        inspect.getdoc(shown), {}, shown.__name__, inspect.getfile(inspect.unwrap(shown))
        if inspect.isfunction(shown) else None, 0
    )  # fmt: skip
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert found.examples
    assert runner.run(found, out=sys.stderr.write).failed == 0


def test_a_launched_kernel_takes_its_time_and_touches_what_it_says(sim):
    sim(rates=Rates(host_launch_s=0.0, kernel_launch_s=0.0))
    x, y = torch.zeros(4, device=sim.device), torch.zeros(4, device=sim.device)
    sim.module.synchronize()
    begin_s, launches = sim.elapsed_s, sim.launches("compute")
    sim.launch_kernel(0.25, reads=[x], writes=[y])
    assert sim.elapsed_s == pytest.approx(begin_s + 0.25)
    assert sim.launches("compute") == launches + 1
    with sim.module.stream(sim.module.Stream()):
        sim.launch_kernel(0.25, reads=[x])
        with pytest.raises(RaceError, match=r"RAW: .*\(aten::sum after a kernel of launch_kernel"):
            y.sum()
    sim.module.synchronize()
    assert len(sim.take_faults()) == 1
    with pytest.raises(ValueError, match="takes 0 seconds or more"):
        sim.launch_kernel(-1.0)
