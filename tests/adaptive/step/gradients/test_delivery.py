"""Gradients are delivered all or not at all, and with them all else that a step changes."""

from pathlib import Path

import pytest

from tests.programs import run_program


@pytest.mark.slow
def test_an_interrupt_finds_all_gradients_delivered_or_none():
    done = run_program(Path(__file__).with_name("interrupted.py"))
    assert done.returncode == 0, done.stderr
