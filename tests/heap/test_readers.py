"""A thread that counts holders waits for one that has a list of all objects."""

from tenure._heap import tracked_objects, wait_for_readers


def test_it_waits_until_the_other_thread_has_freed_its_list(monkeypatch):
    heaps = [tracked_objects()]
    # the other thread ends meanwhile
    monkeypatch.setattr("tenure._heap._collector.sleep", lambda seconds: heaps.clear())
    assert wait_for_readers()
    assert not heaps
    assert not wait_for_readers()


def test_it_gives_up_when_the_list_stays(monkeypatch):
    heap = tracked_objects()
    monkeypatch.setattr("tenure._heap._collector._MOST_WAIT_S", 0.0)
    assert not wait_for_readers()
    assert len(heap) > 0
