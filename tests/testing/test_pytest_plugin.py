import pytest
import torch

from tenure.testing import simulated_accelerator

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.simdevice  # its suites run in this process, with the fixture

INI = """
[pytest]
markers =
  simdevice: runs on the simulated accelerator
  sim_allocator: always runs with this allocator
"""
CONFTEST = "from tests.testing._pytest_plugin import *\n"


@pytest.fixture
def set_up():
    with simulated_accelerator():
        pass


@pytest.fixture
def suite(set_up, pytester):  # in this order: pytester forgets the modules that are imported later
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    return pytester


def test_a_test_with_the_fixture_is_marked_and_others_are_not(suite):
    suite.makepyfile("def test_with(sim): pass\ndef test_without(): pass")
    result = suite.runpytest_inprocess("-m", "simdevice", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["*::test_with", "*1 deselected*"])


def test_a_race_left_behind_fails_the_test(suite):
    suite.makepyfile(
        """
        import torch

        def test_races(sim):
            x = torch.ones(4).pin_memory()
            x.to(sim.device, non_blocking=True)
            x.fill_(2)
        """
    )
    result = suite.runpytest_inprocess("-m", "simdevice")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*RaceError: host overwrite: pinned host memory was written*"])


def test_the_command_chooses_the_allocator_of_tests_that_name_none(suite):
    suite.makepyfile(
        """
        import pytest
        import torch

        def reserved_by_a_tensor(sim):
            tensor = torch.ones(1, device=sim.device)
            return sim.reserved_bytes

        def test_without_a_name(sim):
            assert reserved_by_a_tensor(sim) == 2 << 20

        def test_after_another_start(sim):
            assert reserved_by_a_tensor(sim(budget="2MiB")) == 2 << 20

        @pytest.mark.sim_allocator("cuda")
        def test_named(sim):
            assert reserved_by_a_tensor(sim) == 2 << 20

        @pytest.mark.sim_allocator("exact")
        def test_exact(sim):
            assert reserved_by_a_tensor(sim) == 4
        """
    )
    chosen = suite.runpytest_inprocess("--sim-allocator=cuda")
    chosen.assert_outcomes(passed=2, deselected=2)
    suite.runpytest_inprocess().assert_outcomes(passed=2, failed=2)


def test_each_test_starts_afresh(sim):
    assert sim.allocated_bytes == sim.peak_bytes == sim.n_allocations == 0
    assert sim.elapsed_s == 0.0
    assert sim.budget_bytes is None


def test_the_fixture_takes_a_budget_a_link_and_a_failure(sim):
    from tenure.testing import Rates

    assert sim(budget="1KiB", rates=Rates(copy_latency_s=1.0), fail_at=2) is sim
    assert sim.budget_bytes == 1024
    assert sim.rates.copy_latency_s == 1.0
    torch.ones(1, device=sim.device)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        torch.ones(1, device=sim.device)
