import os

import pytest
import torch
from torch.utils.data import DataLoader

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

_REFUSED = r"Cannot re-initialize sim in forked subprocess.*'spawn' start method"


class _Doubled(torch.utils.data.Dataset):
    """Samples that are made on a device, in whatever process asks."""

    def __init__(self, device, held):
        self.device, self.held = device, held

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (self.held.to(self.device) * 2 + index).cpu()


def _in_a_fork(run):
    """Whether `run` gives True in a forked child."""
    child = os.fork()
    if child == 0:
        held = False
        try:
            held = run()
        finally:
            os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_worker_of_a_loader_that_uses_the_device_is_refused(sim):
    held = torch.ones(4, device=sim.device)
    loader = DataLoader(_Doubled(sim.device, held), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=_REFUSED):
        next(iter(loader))
    assert held.sum().item() == 4  # the parent goes on


def test_the_module_tells_that_it_is_in_a_bad_fork(sim):
    torch.ones(3, device=sim.device)
    assert _in_a_fork(lambda: sim.module._is_in_bad_fork() and torch.manual_seed(3) is not None)
    assert not sim.module._is_in_bad_fork()


def test_a_child_of_a_process_that_has_not_used_the_device_may_use_it(sim):
    assert _in_a_fork(lambda: torch.ones(3, device=sim.device).tolist() == [1, 1, 1])
