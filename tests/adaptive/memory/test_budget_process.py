"""Limits on the memory of the process, each in a process of its own."""

import sys
import textwrap

import pytest

from tenure.adaptive import AdaptiveUsageError, set_cpu_memory_limit
from tests.programs import run_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the system has no RLIMIT_AS")


def output_of(program):
    done = run_program(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_past_the_limit_the_cpu_runs_out_of_memory():
    assert (
        output_of("""
        import psutil
        import torch
        from tenure.adaptive import oom_info, set_cpu_memory_limit
        torch.set_num_threads(1)
        torch.ones(8) @ torch.ones(8)
        used = psutil.Process().memory_info().vms / 2**30
        set_cpu_memory_limit(used + 0.25)
        set_cpu_memory_limit(used + 10)
        try:
            torch.empty(512 << 20, dtype=torch.uint8)
        except RuntimeError as error:
            print(oom_info(error).kind)
    """)
        == "host\n"
    )


def test_the_numbers_of_the_process_make_the_first_step_down_large_enough():
    # Halving would begin with 4096. Some of the address space comes and goes by itself.
    program = """
        import logging
        import psutil
        import torch
        from tenure import adaptive
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
    """
    assert output_of(program).split() == ["True", "8192", "True", "True"]


@pytest.mark.parametrize("gigabytes", [0, -1, "8", True, None, float("nan")])
def test_what_is_no_limit_is_refused(gigabytes):
    with pytest.raises(
        AdaptiveUsageError, match=r"which is no number of GiB\. Give one, such as 8"
    ):
        set_cpu_memory_limit(gigabytes)


def test_a_limit_below_what_is_used_is_refused_and_changes_nothing():
    with pytest.raises(AdaptiveUsageError, match=r"is less than this process uses already: .* GiB"):
        set_cpu_memory_limit(0.01)
    import resource

    assert resource.getrlimit(resource.RLIMIT_AS)[0] != int(0.01 * 2**30)
