"""The short form of every long run: seconds in all. ``make soak`` runs the long one."""

import pytest

from . import damage, day, kills, many_scopes, names, random_programs


def test_scopes_leave_nothing_however_many_there_were():
    growth = many_scopes.run(4000, n_warm=200)
    assert (growth.objects, growth.entries) == (0, 0)


def test_random_programs_in_many_threads_do_what_the_model_says():
    errors, left = random_programs.run_in_threads(8, 3)
    assert (errors, left) == ([], [0] * 8)


def test_days_of_training_leave_nothing():
    growth, ran, final = day.run(420, n_warm=220)
    assert (growth.objects, growth.entries) == (0, 0)
    assert (ran.retries, ran.passes) == (4, 2)
    assert final < 1


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_pages_leaves_nothing_and_harms_nothing():
    assert kills.run(2) == []


def test_a_damaged_file_is_refused_by_name_or_reads_as_it_was_written():
    for kind, found in damage.run(20, 40).items():
        assert not found.wrong, kind
        assert found.refused, kind


def test_hostile_names_are_shown_and_do_nothing_else():
    shown, _, wrong = names.run(2)
    assert wrong == []
    assert shown > 100
