"""A timeline where its process ends, or forks, inside of its block."""

import os

import pytest

from tests.programs import run_program


@pytest.mark.slow
def test_an_interpreter_that_ends_inside_a_block_ends_well_and_has_not_imported_the_compiler():
    done = run_program(
        "import sys, torch\nfrom tenure.profiler import Timeline\n"
        "timeline = Timeline().__enter__()\ntorch.ones(1) + 1\n"
        "assert 'torch._dynamo' not in sys.modules\n",
        hides=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKS = """
import os
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from tenure.profiler import ProfilerUsageError, Timeline

# a child of a process whose OpenMP has run waits for ever for threads that it has not
torch.set_num_threads(1)

def train():
    model = torch.nn.Linear(64, 64)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    return model.weight.sum().item()

plain, child = train(), None
with Timeline() as alone:
    kept = torch.ones(1000)
del kept
with Timeline() as timeline:
    kept = torch.ones(1000)
    child = os.fork()
    if child == 0:
        assert _len_torch_dispatch_stack() == 0
        assert train() == plain
        kept = None
if child == 0:
    print("child", repr(timeline))
    try:
        timeline.export("run.csv")
    except ProfilerUsageError as error:
        print("child", error)
    with Timeline() as own:
        train()
    print("child", own.report.n_events > 0, flush=True)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for each in (alone, timeline):
    print("parent", each.report.n_events, each.report.devices[0].peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_child_that_is_forked_in_a_block_runs_plainly_and_leaves_the_recording(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = run_program(FORKS, hides=True)
    assert (done.returncode, done.stderr) == (0, "")
    *child, alone, parent = done.stdout.splitlines()
    assert alone == parent
    assert child[0] == "child <Timeline, left to the parent process>"
    assert "has no report here: this process was forked in its block" in child[1]
    assert child[2:] == ["child True"]
    assert [*tmp_path.iterdir()] == []
