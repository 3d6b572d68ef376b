import pytest
import torch

pytest_plugins = ["pytester"]

INI = "[pytest]\nmarkers =\n  simdevice: runs on the simulated accelerator\n"
CONFTEST = "from tests.simdevice._pytest_plugin import pytest_collection_modifyitems, sim\n"


@pytest.fixture
def suite(pytester, sim):
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


def test_each_test_starts_afresh(sim):
    assert sim.allocated_bytes == sim.peak_bytes == sim.allocation_count == 0
    assert sim.elapsed_s == 0.0
    assert sim.budget_bytes is None


def test_the_fixture_takes_a_budget_a_link_and_a_failure(sim):
    from . import Rates

    assert sim(budget="1KiB", link=Rates(copy_latency_s=1.0), fail_at=2) is sim
    assert sim.budget_bytes == 1024
    assert sim.rates.copy_latency_s == 1.0
    torch.ones(1, device=sim.device)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        torch.ones(1, device=sim.device)
