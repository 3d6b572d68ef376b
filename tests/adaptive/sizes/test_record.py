"""What a record keeps of sizes that failed, where memory comes and goes."""

import pytest

from tenure.adaptive._sizes._record import SizeRecord


@pytest.mark.parametrize("needed_bytes", [380, None])
def test_a_size_that_works_though_it_failed_is_followed_by_larger_ones(needed_bytes):
    record = SizeRecord()
    record.note_failed(1024, 1, "cpu", 390)
    record.note_ok(220, needed_bytes, 390)
    record.note_failed(221, 1, "cpu", 320)
    record.note_ok(236, needed_bytes, 390)
    assert record.bad is None or record.is_guess
    assert record.start(1024, 1024, 1) < 1024
    # by what was measured, if it was: what failed far above would fail whenever memory breathes
    assert record.climbing is (needed_bytes is None)


def test_a_smaller_size_that_needed_more_tells_nothing_of_a_slope():
    record = SizeRecord()
    record.note_ok(7, 4437)
    record.note_ok(8, 1974)
    assert record.points == ((8, 1974),)
    record.note_ok(22, 4800)
    assert record.points == ((8, 1974), (22, 4800))


def test_a_smaller_size_says_that_a_larger_one_needs_less_than_it_did():
    record = SizeRecord()
    record.note_ok(100, 1000)
    record.note_ok(50, 300)
    assert record.points == ((100, 600),)
    record.note_ok(50, 400)
    assert record.points == ((100, 600),)


def test_a_size_that_was_tried_and_measured_ends_the_climb():
    record = SizeRecord(20, 30, climbing=True)
    record.note_ok(21)
    assert record.climbing
    record.note_ok(22, 2200)
    assert not record.climbing


def test_a_size_that_runs_again_and_is_not_measured_keeps_what_was():
    record = SizeRecord()
    record.note_ok(10, 200)
    record.note_ok(20, 300)
    record.note_ok(20)
    assert record.points == ((10, 200), (20, 300))
    record.note_ok(30)
    assert record.points == ((30, 450),)
