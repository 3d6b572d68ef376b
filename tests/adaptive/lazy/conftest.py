"""Fixtures of the tests of recorded tensors."""

import pytest

from tenure.adaptive._lazy import _program


@pytest.fixture
def steps(monkeypatch):
    """The micro-batch, and the attempts, of each program that was given to `step`."""
    found, step = [], _program.run_step

    def noted(*args, **kwargs):
        result = step(*args, **kwargs)
        found.append((result.micro_batch, result.attempts))
        return result

    monkeypatch.setattr(_program, "run_step", noted)
    return found
