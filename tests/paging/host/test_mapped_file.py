"""Weights over a file have its values and those written since, however the system reads."""

import copy
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tenure.paging import load_paged

pytestmark = pytest.mark.usefixtures("without_gradients")


def in_parts(monkeypatch):
    """A disk that reads a thousand bytes at a time."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))


def untold(monkeypatch):
    """A system that does not tell which pages were written, as any other than Linux."""
    monkeypatch.setattr("tenure.paging._files.tells_written", lambda: False)


def linears():
    # Pages of memory are smaller than the weights, and begin in the middle of one.
    return nn.Sequential(*[nn.Linear(n, m) for n, m in ((70, 90), (90, 50), (50, 70))]).eval()


@pytest.mark.parametrize("system", [lambda monkeypatch: None, in_parts, untold])
def test_a_pass_has_the_values_of_the_file_and_those_written_since(system, tmp_path, monkeypatch):
    system(monkeypatch)
    plain, path = linears(), tmp_path / "model.safetensors"
    save_file(plain.state_dict(), path)
    content, x = path.read_bytes(), torch.randn(3, 70)
    with torch.device("meta"):
        model = linears()
    generator = torch.Generator().manual_seed(0)
    with load_paged(model, path, "cpu", budget="48KiB") as handle:
        assert handle.plan.ring_bytes
        for _ in range(12):
            for _ in range(2):
                assert torch.equal(model(x), plain(x))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                at = torch.randint(ours.numel(), (1,), generator=generator).item()
                ours.view(-1)[at] = theirs.view(-1)[at] = 7.0
    assert torch.equal(model(x), plain(x))
    assert path.read_bytes() == content


def test_a_tensor_outlives_the_closed_and_deleted_file(tmp_path):
    plain, path = linears(), tmp_path / "model.safetensors"
    save_file(plain.state_dict(), path)
    model = copy.deepcopy(plain).to("meta")
    load_paged(model, path, "cpu").unpage()
    path.unlink()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.untyped_storage().nbytes() == ours.nbytes
