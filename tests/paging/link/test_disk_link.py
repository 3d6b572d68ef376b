"""From files to the simulated device, through staging memory that is used over and over."""

import os

import pytest
import torch
from torch import nn

from tenure.paging import load_paged, page
from tenure.testing import Rates

from ..models import WIDTH, mlp
from ..test_zoo import assert_equal, home, saved


@torch.no_grad()
def test_a_model_passes_through_staging_memory_smaller_than_its_units(sim, tmp_path, monkeypatch):
    # 16 MiB otherwise
    monkeypatch.setattr("tenure.paging._file_link._SLOT_BYTES", 512)
    model, x = mlp(), torch.ones(4, WIDTH)
    expected = home(model.to(sim.device)(x.to(sim.device)))
    model = model.cpu()
    sim(rates=Rates(h2d_bytes_per_s=1e6))
    with load_paged(
        model, saved(model, tmp_path / "m.safetensors"), sim.device, budget="10KiB"
    ) as h:
        for _ in range(3):
            assert_equal(home(model(x)), expected)
        report = h.report()
        assert (report.staging_bytes, report.host_bytes) == (4 * 512, 0)
    sim.finish()


@torch.no_grad()
def test_statistics_that_a_pass_changes_are_home_before_the_file_is_read_again(sim, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(8)])
    plain = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(8)]).to(sim.device)
    x = torch.randn(4, WIDTH)
    with page(model, sim.device, budget="3KiB", host=tmp_path) as handle:
        assert any(not unit.resident for unit in handle.plan.units)
        for _ in range(3):
            assert_equal(home(model(x)), home(plain(x.to(sim.device))))
    assert_equal(model.state_dict(), home(plain.state_dict()))


def test_a_device_without_room_leaves_nothing_pinned_nor_open(sim, tmp_path):
    model, x = mlp(), torch.ones(1, WIDTH)
    expected, path = model(x), saved(model, tmp_path / "m.safetensors")
    sim(budget="4KiB")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(torch.OutOfMemoryError):
        load_paged(model, path, sim.device, budget="12KiB")
    with pytest.raises(torch.OutOfMemoryError):
        page(model, sim.device, budget="12KiB", host=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert_equal(model(x), expected)
