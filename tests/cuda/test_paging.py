"""Paging by a real allocator, a real link and a real driver."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tenure.paging import PagingWarning, page

from .conftest import MIB


class Mean(nn.Module):
    """A layer of one weight that reads all of it."""

    def __init__(self, n_bytes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_bytes // 4), requires_grad=False)

    def forward(self, x):
        return x + self.weight.mean()


class Layer(nn.Module):
    """As in a transformer, without attention."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(("n_layers", "layer_mib", "budget_mib"), [(40, 7, 200), (40, 11.5, 300)])
def test_the_reserved_bytes_of_a_paged_model_stay_within_its_budget(
    rig, tell, n_layers, layer_mib, budget_mib
):
    model = nn.Sequential(*[Mean(int(layer_mib * MIB)) for _ in range(n_layers)]).eval()
    x = torch.ones(8, device=rig.device)
    rig.tidy()
    before_bytes = rig.reserved_bytes()
    allocated_bytes = rig.module.memory_allocated(rig.device)
    with torch.inference_mode(), page(model, rig.device, budget=f"{budget_mib}MiB"):
        for _ in range(2):
            model(x).cpu()
        taken_bytes = rig.reserved_bytes() - before_bytes
        allocated_bytes = rig.module.memory_allocated(rig.device) - allocated_bytes
    tell(
        f"{taken_bytes / MIB:.1f} MiB reserved and {allocated_bytes / MIB:.1f} allocated"
        f" for a budget of {budget_mib} MiB"
    )
    assert allocated_bytes <= (budget_mib + 1) * MIB  # up to so much is not split off
    assert taken_bytes <= (budget_mib + 22) * MIB  # a segment of activations in each pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_paged_model_computes_the_same_bits(rig, tell, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(256) for _ in range(8)]).to(dtype).eval()
    x = torch.randn(16, 256).to(rig.device, dtype)
    with torch.inference_mode():
        whole = copy.deepcopy(model).to(rig.device)(x).cpu()
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with page(model, rig.device, budget=weight_bytes // 3) as handle:
            paged = [model(x).cpu() for _ in range(3)]
            report = handle.report()
    tell(f"{dtype}: {report.bytes_per_pass} bytes a pass, outputs equal")
    assert report.bytes_per_pass > 0
    assert all(torch.equal(each, whole) for each in paged)


class FailsToPin:
    """A runtime whose registrations truly fail: the memory is pinned already."""

    def __init__(self, runtime):
        self._runtime = runtime
        self.codes = []

    def cudaHostRegister(self, address, n_bytes, flags):
        if int(self._runtime.cudaHostRegister(address, n_bytes, flags)) == 0:
            self.codes.append(int(self._runtime.cudaHostRegister(address, n_bytes, flags)))
            self._runtime.cudaHostUnregister(address)
            return self.codes[-1]
        return -1

    def __getattr__(self, name):
        return getattr(self._runtime, name)


def test_pinning_that_fails_leaves_nothing_to_the_next_kernel(rig, tell, monkeypatch):
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).eval()
    x = torch.randn(4, 256, device=rig.device)
    with torch.inference_mode():
        whole = copy.deepcopy(model).to(rig.device)(x).cpu()
        runtime = FailsToPin(rig.module.cudart())
        monkeypatch.setattr(rig.module, "cudart", lambda: runtime)
        with (
            pytest.warns(PagingWarning, match="could not be pinned"),
            page(model, rig.device, budget="600KiB"),
        ):
            paged = model(x).cpu()
    tell(f"the driver said {runtime.codes}, and the next kernels ran")
    assert runtime.codes
    assert all(code != 0 for code in runtime.codes)
    assert torch.equal(paged, whole)


def test_unpinning_that_fails_leaves_nothing_to_the_next_kernel(rig, tell):
    class Twice(FailsToPin):
        def cudaHostRegister(self, address, n_bytes, flags):
            return self._runtime.cudaHostRegister(address, n_bytes, flags)

        def cudaHostUnregister(self, address):
            self._runtime.cudaHostUnregister(address)
            self.codes.append(int(self._runtime.cudaHostUnregister(address)))
            return self.codes[-1]

    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).eval()
    runtime = Twice(rig.module.cudart())
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        torch.inference_mode(),
    ):
        warnings.simplefilter("ignore", PagingWarning)
        patch.setattr(rig.module, "cudart", lambda: runtime)
        with page(model, rig.device, budget="600KiB"):
            model(torch.ones(4, 256, device=rig.device)).cpu()
    total = (torch.ones(4, device=rig.device) * 2).sum().item()
    tell(f"the driver said {runtime.codes}, and the next kernels ran")
    assert runtime.codes
    assert all(code != 0 for code in runtime.codes)
    assert total == 8


def test_the_share_of_the_link_that_paging_reaches(rig, tell):
    layer_bytes = (1 if rig.sim else 64) * MIB
    model = nn.Sequential(*[Mean(layer_bytes) for _ in range(24)]).eval()
    x = torch.ones(8, device=rig.device)
    host = torch.empty(layer_bytes, dtype=torch.uint8).pin_memory()
    there = rig.bytes(layer_bytes)

    def milliseconds(work):
        times = []
        for _ in range(3):
            begin, end = (rig.module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    copied_ms = milliseconds(lambda: [there.copy_(host, non_blocking=True) for _ in range(24)])
    with torch.inference_mode(), page(model, rig.device, budget=4 * layer_bytes) as handle:
        model(x)
        passed_ms = milliseconds(lambda: model(x))
        passing_bytes = handle.report().bytes_per_pass
    rate = 24 * layer_bytes / copied_ms / 1e6
    share = passing_bytes / passed_ms / 1e6 / rate
    tell(f"{rate:.1f} GB/s by itself, {share:.0%} of it while paging")
    assert share > 0.3  # a measurement: only what is badly broken fails
