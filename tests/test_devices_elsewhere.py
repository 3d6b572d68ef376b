"""Work that names a device which is not here runs, and leaves its tensors on another one."""

import pytest
import torch

from tenure._devices import Elsewhere, is_here

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def elsewhere(request):
    return Elsewhere("xpu".__eq__, CPU, keeps_names=request.param)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(2).xpu(),
        lambda: torch.ones(2).to("xpu:1"),
        lambda: torch.ones(2).to(torch.device("xpu")),
        lambda: torch.ones(2, device="xpu"),
        lambda: torch.nn.Linear(2, 2, device="xpu").to("xpu").weight,
    ],
)
def test_what_is_made_there_is_made_on_the_other_one(elsewhere, made):
    with elsewhere:
        assert made().device == CPU


def test_a_device_keeps_its_name_where_that_is_wanted():
    with Elsewhere("xpu".__eq__, CPU, keeps_names=True):
        assert torch.device("xpu").type == "xpu"
    with Elsewhere("xpu".__eq__, CPU, keeps_names=False):
        assert torch.device("xpu") == CPU


def test_other_devices_are_what_they_are(elsewhere):
    with elsewhere:
        assert torch.ones(2, device="meta").device.type == "meta"


def test_a_backend_that_nobody_knows_is_not_here():
    assert is_here("cpu")
    assert not is_here("hpu")
    assert not is_here("no such backend")
