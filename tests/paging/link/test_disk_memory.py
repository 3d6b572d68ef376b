"""A model larger than the memory it may take runs from a disk: measured on the process itself."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tenure.adaptive import memory_budget
from tenure.paging import load_paged, page
from tests.shrinking import ask_to_shrink

from ..models import WIDTH, mlp
from ..support import assert_equal, on_meta, saved

pytestmark = pytest.mark.usefixtures("without_gradients")

MIB = 2**20
X = torch.ones(4, WIDTH)

_SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
from tenure.paging import load_paged, page
torch.set_num_threads(1)
torch.set_grad_enabled(False)
folder = Path(sys.argv[1])

def resident_bytes(what="VmRSS"):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))

def model(device):
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)]).eval()

x = torch.ones(2, 1024)
ours = model("cpu")
before, expected = resident_bytes(), ours(x)
handle = page(ours, "cpu", budget="24MiB", host=folder)
assert ours(x).equal(expected) and ours(x).equal(expected)
print(before - resident_bytes())
handle.unpage()
assert ours(x).equal(expected)
del handle, ours

nn.Linear(1024, 1024)(x)  # what torch's own first product takes
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = resident_bytes()
handle = load_paged(model("meta"), folder / "m.safetensors", "cpu", budget="24MiB")
outputs = [handle.model(x) for _ in range(3)]
assert all(output.equal(outputs[0]) for output in outputs)
print(handle.plan.allocated_bytes, resident_bytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_model_of_128_mib_takes_its_budget_of_24_and_one_in_memory_gives_it_back(tmp_path):
    """Never all weights in memory, neither while loading nor while computing."""
    layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)])
    saved(layers, tmp_path / "m.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    given_bytes, handle_bytes, peak_bytes = map(int, done.stdout.split())
    assert 20 * MIB <= handle_bytes <= 24 * MIB
    assert peak_bytes <= handle_bytes + 8 * MIB
    assert given_bytes >= (128 - 24 - 8) * MIB


def test_a_memory_budget_counts_what_is_paged_and_what_the_model_computes(tmp_path):
    model, ours = mlp(), on_meta(mlp)
    expected, path = model(X), saved(model, tmp_path / "m.safetensors")
    with memory_budget("16KiB") as budget, load_paged(ours, path, "cpu", budget="12KiB") as handle:
        for _ in range(3):
            assert_equal(ours(X), expected)
        report = handle.report()
    assert report.resident_bytes + report.ring_bytes < budget.peak_bytes <= 16 * 2**10
    with pytest.raises(torch.OutOfMemoryError), memory_budget("16KiB"):
        mlp().load_state_dict(model.state_dict())


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
