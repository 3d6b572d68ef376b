"""What a record keeps of sizes that failed, where memory comes and goes."""

from tenure.adaptive._sizes._record import SizeRecord


def breathing(*, needed_bytes):
    """A record of 1024 and 221 that failed, and of 236 that works when more is free."""
    record = SizeRecord()
    record.note_failed(1024, 1, "cpu", 390)
    record.note_ok(220, needed_bytes, 390)
    record.note_failed(221, 1, "cpu", 320)
    record.note_ok(236, needed_bytes, 390)
    return record


def test_where_sizes_are_measured_what_failed_far_above_is_remembered():
    record = breathing(needed_bytes=380)
    assert (record.ok, record.bad, record.free_bytes) == (236, 1024, 390)
    record.note_ok(1024, 380, 9000)
    assert record.bad is None


def test_where_nothing_is_measured_all_is_tried_anew():
    assert breathing(needed_bytes=None).bad is None


def test_a_smaller_size_that_needed_more_tells_nothing_of_a_slope():
    record = SizeRecord()
    record.note_ok(7, 4437)
    record.note_ok(8, 1974)
    assert record.points == ((8, 1974),)
    record.note_ok(22, 4800)
    assert record.points == ((8, 1974), (22, 4800))
