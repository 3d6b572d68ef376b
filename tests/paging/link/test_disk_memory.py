"""A model larger than the memory it may take runs from a disk: measured on the process itself."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from tenure.adaptive import memory_budget
from tenure.paging import load_paged, page
from tests.shrinking import ask_to_shrink

from ..models import WIDTH, mlp
from ..test_zoo import assert_equal, saved

MIB = 2**20
X = torch.ones(4, WIDTH)

_SCRIPT = """
import os, threading, torch
from torch import nn
from tenure.paging import load_paged, page
torch.set_num_threads(1)

def resident_bytes(what="VmRSS"):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))

def model(device):
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)]).eval()

def measured(paged, passes=3):
    x = torch.ones(2, 1024)
    with torch.no_grad():
        nn.Linear(1024, 1024)(x)  # what torch's own first product takes
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
        before = resident_bytes()
        handle = paged()
        outputs = [handle.model(x) for _ in range(passes)]
    assert all(output.equal(outputs[0]) for output in outputs)
    return handle, outputs[0], resident_bytes("VmHWM") - before
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_model_of_128_mib_takes_its_budget_of_24_and_little_more(tmp_path):
    """Never all weights in memory, neither while loading nor while computing."""
    path = tmp_path / "m.safetensors"
    state = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)]).state_dict()
    from safetensors.torch import save_file

    save_file(state, path)
    del state
    handle_bytes, peak_bytes = map(
        int,
        run(
            """
            paged = lambda: load_paged(model("meta"), os.environ["WEIGHTS"], "cpu", budget="24MiB")
            handle, _, peak_bytes = measured(paged)
            print(handle.plan.allocated_bytes, peak_bytes)
            """,
            WEIGHTS=str(path),
        ),
    )
    assert 20 * MIB <= handle_bytes <= 24 * MIB
    assert peak_bytes <= handle_bytes + 8 * MIB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_model_that_was_in_memory_gives_it_back(tmp_path):
    before_bytes, after_bytes = map(
        int,
        run(
            """
            from pathlib import Path
            ours = model("cpu")
            before = resident_bytes()
            x = torch.ones(2, 1024)
            with torch.no_grad():
                expected = ours(x)
                handle = page(ours, "cpu", budget="24MiB", host=Path(os.environ["FOLDER"]))
                assert ours(x).equal(expected) and ours(x).equal(expected)
            print(before, resident_bytes())
            handle.unpage()
            assert ours(x).equal(expected)
            """,
            FOLDER=str(tmp_path),
        ),
    )
    assert before_bytes - after_bytes >= (128 - 24 - 8) * MIB


@torch.no_grad()
def test_a_memory_budget_counts_what_is_paged_and_what_the_model_computes(tmp_path):
    model = mlp()
    expected, path = model(X), saved(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        ours = mlp()
    with memory_budget("16KiB") as budget, load_paged(ours, path, "cpu", budget="12KiB") as handle:
        for _ in range(3):
            assert_equal(ours(X), expected)
        report = handle.report()
    assert report.resident_bytes + report.ring_bytes < budget.peak_bytes <= 16 * 2**10
    with pytest.raises(torch.OutOfMemoryError), memory_budget("16KiB"):
        mlp().load_state_dict(model.state_dict())


@torch.no_grad()
def test_where_the_hosts_memory_runs_short_units_that_stayed_pass(tmp_path):
    model = mlp()
    expected = model(X)
    with page(model, "cpu", budget="14KiB", host=tmp_path) as handle:
        model(X)
        stayed_bytes = handle.report().resident_bytes
        assert ask_to_shrink("cuda:0", 1) == 0
        assert 0 < ask_to_shrink("cpu", 1) <= stayed_bytes
        for _ in range(2):
            assert_equal(model(X), expected)
