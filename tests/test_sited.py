"""Where a tensor was made: known from a scope that captured it, and nowhere else."""

import torch

from tenure import NewDisposeScope, detach_from_scope
from tenure._sited import created_at


def test_a_tensor_of_no_scope_has_no_site():
    assert created_at(torch.ones(2)) is None


def test_a_scope_that_captures_nothing_gives_no_site():
    with NewDisposeScope():
        assert created_at(torch.ones(2)) is None


def test_the_site_stays_known_while_and_after_the_scope_is_open():
    with NewDisposeScope(capture="site"):
        made = torch.ones(2)
        line = made_at(made)
        detach_from_scope(made)
    assert created_at(made) == f"tests/test_sited.py:{line}"


def test_the_site_of_a_survivor_outlasts_a_scope_that_reports():
    with NewDisposeScope(policy="report"):
        made = torch.ones(2)
    assert made_at(made) == 28


def made_at(tensor):
    """The line in this file."""
    path, _, line = created_at(tensor).rpartition(":")
    assert path.endswith("test_sited.py")
    return int(line)
