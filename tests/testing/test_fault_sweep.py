import pytest
import torch

from tenure.testing import SimulatorUsageError, for_each_allocation


def three_allocations(sim):
    a = torch.ones(10, device=sim.device)
    b = a + 1
    return (a * b).tolist()


def test_each_allocation_fails_once_and_the_last_run_passes(sim):
    failures, runs = [], []

    def program(copes):
        runs.append(1)
        try:
            return three_allocations(sim)
        except torch.OutOfMemoryError:
            if not copes:
                raise
            return "coped"

    def check(failure):
        assert copes or "planted" in str(failure.error)
        assert copes or failure.error.__traceback__ is None
        assert sim.allocated_bytes == 0
        failures.append((failure.number, failure.result))

    for copes, result in ((False, None), (True, "coped")):
        assert for_each_allocation(lambda copes=copes: program(copes), check) == 3
        assert failures == [(number, result) for number in (1, 2, 3)]
        assert len(runs) == 4
        assert not sim.failure_is_planted
        failures.clear()
        runs.clear()


def test_another_error_says_which_allocation_had_failed(sim):
    def program():
        try:
            return three_allocations(sim)
        except torch.OutOfMemoryError:
            raise KeyError("lost") from None

    with pytest.raises(KeyError, match="lost") as caught:
        for_each_allocation(program)
    assert caught.value.__notes__[0].startswith("raised while allocation 1 of")
    assert not sim.failure_is_planted


def test_the_causes_of_a_failure_hold_no_memory_either(sim):
    def program():
        x = torch.ones(100, device=sim.device)
        try:
            return x + 1
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("gave up") from error

    def check(failure):
        assert failure.number == 1 or failure.error.__cause__ is not None
        assert sim.allocated_bytes == 0

    assert for_each_allocation(program, check) == 2


def test_a_budget_that_is_too_small_is_not_taken_for_the_planted_failure(sim):
    sim(budget=60)
    with pytest.raises(torch.OutOfMemoryError, match=r"budget of 60 bytes .*streams\.$"):
        for_each_allocation(lambda: [torch.ones(n, device=sim.device) for n in (1, 100)])


def test_what_can_not_be_swept_says_what_to_do(sim):
    def ones(n=1, device="sim:0"):
        return [torch.ones(1, device=device) for _ in range(n)]

    with pytest.raises(SimulatorUsageError, match=r"\(check=3\): it can't be called"):
        for_each_allocation(ones, 3)
    with pytest.raises(AssertionError, match="still allocates after 5 runs; raise max_runs="):
        for_each_allocation(lambda: ones(9), lambda _: None, max_runs=5)

    def in_a_sweep():
        with pytest.raises(SimulatorUsageError, match=r"planted on sim:0 already.*around this one"):
            for_each_allocation(ones)
        assert sim.failure_is_planted
        return ones()

    assert for_each_allocation(in_a_sweep) == 1
    sim(devices=2)
    match = r"nothing on sim:0, .* Let it use sim:0, or choose another of the 2 devices with index="
    with pytest.raises(SimulatorUsageError, match=match):
        for_each_allocation(lambda: ones(device="sim:1"))
    assert for_each_allocation(lambda: ones(device="sim:1"), index=1) == 1
