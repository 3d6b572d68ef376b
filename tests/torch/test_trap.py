"""What Courtesy relies on in torch and what torch does not promise."""

import gc

import pytest
import torch

from tenure._torch import trap
from tenure._torch.storages import key_of
from tenure.profiler import Courtesy
from tests.needs import needs_torch


@pytest.fixture
def traps(monkeypatch):
    """A torch with traps: what is armed, and every call."""
    gc.collect()  # a Courtesy moves earlier tests' garbage as well
    armed, calls = {}, []

    def arm(key, message):
        armed[key] = message
        calls.append("arm")

    def disarm(key):
        del armed[key]
        calls.append("disarm")

    monkeypatch.setattr(trap._SET, arm, raising=False)
    monkeypatch.setattr(trap._CLEAR, disarm, raising=False)
    monkeypatch.setattr(trap, "works", lambda: True)
    return armed, calls


def test_a_storage_is_trapped_while_it_is_away(sim, traps):
    armed, calls = traps
    x = torch.ones(4, device=sim.device)
    key = key_of(x.untyped_storage())
    with Courtesy():
        assert armed == {
            key: "16 B on sim:0: its bytes are in host memory: leave the block of tenure's "
            "Courtesy, or call its restore()."
        }
    assert calls == ["arm", "disarm"]
    assert x.sum() == 4


def test_a_restore_without_room_traps_again(sim, traps):
    armed, calls = traps
    x = torch.ones(4, device=sim.device)
    courtesy = Courtesy()
    courtesy.yield_memory()
    sim.fail_at(1)
    with pytest.raises(RuntimeError, match="no memory"):
        courtesy.restore()
    assert calls == ["arm", "disarm", "arm"]
    assert len(armed) == 1
    courtesy.restore()
    assert (armed, x.sum()) == ({}, 4)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@needs_torch("2.12", "older ones can't take a trap out")
def test_a_cuda_build_has_traps():
    assert trap.works()
