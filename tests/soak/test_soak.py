"""The short form of every long run: seconds in all. ``make soak`` runs the long one."""

from pathlib import Path

import pytest

from ..programs import run_program
from . import damage, kills, names, random_programs

_BEGIN = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
from tests.soak import day, many_scopes

def told(growth):
    print(f"entries: {growth.entries}, objects: {growth.types or 0}")
"""


def _run_alone(program):
    """Run it in a new process, because a worker of pytest has a thread and garbage of its own."""
    done = run_program(_BEGIN + program, ROOT=str(Path(__file__).parents[2]))
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.slow
def test_scopes_leave_nothing_however_many_there_were():
    assert _run_alone("told(many_scopes.run(4000, n_warm=200))") == ["entries: 0, objects: 0"]


def test_random_programs_in_many_threads_do_what_the_model_says():
    errors, left = random_programs.run_in_threads(8, 3)
    assert (errors, left) == ([], [0] * 8)


@pytest.mark.slow
def test_days_of_training_leave_nothing():
    program = """
growth, ran, final = day.run(420, n_warm=220)
told(growth)
print(ran.retries, ran.passes, final < 1)
"""
    assert _run_alone(program) == ["entries: 0, objects: 0", "4 2 True"]


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_pages_leaves_nothing_and_harms_nothing():
    assert kills.run(2) == []


def test_a_damaged_file_is_refused_by_name_or_reads_as_it_was_written():
    for kind, found in damage.run(20, 40).items():
        assert not found.wrong, kind
        assert found.refused, kind


@pytest.mark.slow
def test_hostile_names_are_shown_and_do_nothing_else():
    # each takes the time that a report takes to be drawn
    shown, _, wrong = names.run(2, {"all": " ".join(names.HOSTILE.values())})
    assert wrong == []
    assert shown > 10
