"""From files to the simulated device, through staging memory that is used over and over."""

import copy

import pytest
import torch
from torch import nn

from tenure.paging import load_paged, page
from tenure.testing import Rates

from ..models import WIDTH, mlp
from ..support import assert_equal, home, open_files, saved, whole_output

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_a_model_passes_through_staging_memory_smaller_than_its_units(sim, tmp_path, monkeypatch):
    # 16 MiB otherwise
    monkeypatch.setattr("tenure.paging._file_link._SLOT_BYTES", 512)
    model, x = mlp(), torch.ones(4, WIDTH)
    expected, path = whole_output(sim.device, model, x), saved(model, tmp_path / "m.safetensors")
    sim(rates=Rates(h2d_bytes_per_s=1e6))
    with load_paged(model, path, sim.device, budget="10KiB") as handle:
        for _ in range(3):
            assert_equal(home(model(x)), expected)
        report = handle.report()
        assert (report.staging_bytes, report.host_bytes) == (4 * 512, 0)


def test_statistics_that_a_pass_changes_are_home_before_the_file_is_read_again(sim, tmp_path):
    model, x = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(8)]), torch.randn(4, WIDTH)
    plain = copy.deepcopy(model).to(sim.device)
    with page(model, sim.device, budget="3KiB", host=tmp_path) as handle:
        assert any(not unit.resident for unit in handle.plan.units)
        for _ in range(3):
            assert_equal(home(model(x)), home(plain(x.to(sim.device))))
    assert_equal(model.state_dict(), home(plain.state_dict()))


def test_a_device_without_room_leaves_nothing_pinned_nor_open(sim, tmp_path):
    model, x = mlp(), torch.ones(1, WIDTH)
    expected, path = model(x), saved(model, tmp_path / "m.safetensors")
    sim(budget="4KiB")
    before = open_files()
    with pytest.raises(torch.OutOfMemoryError):
        load_paged(model, path, sim.device, budget="12KiB")
    with pytest.raises(torch.OutOfMemoryError):
        page(model, sim.device, budget="12KiB", host=tmp_path)
    assert open_files() == before
    assert_equal(model(x), expected)
