"""Limits on the memory of the process, each in a process of its own."""

import sys
import textwrap

import pytest

from tenure.adaptive import AdaptiveUsageError, set_cpu_memory_limit
from tests.programs import run_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the system has no RLIMIT_AS")


def test_past_the_limit_the_cpu_runs_out_of_memory_and_the_first_step_down_is_large_enough():
    # Halving would begin with 4096. Some of the address space comes and goes by itself.
    program = """
        import logging
        import psutil
        import torch
        from tenure import adaptive
        from tenure.adaptive import oom_info
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        events = []

        @adaptive.chunked(initial_step=8192, on_retry=events.append)
        def work(chunk, start, end):
            torch.empty(end - start, 1 << 20, dtype=torch.uint8)[:1].sum()
            chunk += 1

        work(torch.zeros(10), toma_initial_step=2)
        x = torch.zeros(8192)
        adaptive.set_cpu_memory_limit(psutil.Process().memory_info().vms / 2**30 + 0.5)
        work(x)
        print(bool((x == 1).all()), events[0].size, events[0].next_size <= 512, len(events) <= 3)
        try:
            torch.empty(1 << 30, dtype=torch.uint8)
        except RuntimeError as error:
            print(oom_info(error).kind)
    """
    done = run_program(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "8192", "True", "True", "host"]


NO_NUMBER = r"which is no number of GiB\. Give one, such as 8"


@pytest.mark.parametrize(
    ("gigabytes", "message"),
    [
        *[(each, NO_NUMBER) for each in (0, "8", True, float("nan"))],
        (0.01, r"is less than this process uses already: .* GiB"),
    ],
)
def test_a_limit_that_can_not_be_is_refused_and_changes_nothing(gigabytes, message):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(AdaptiveUsageError, match=message):
        set_cpu_memory_limit(gigabytes)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
