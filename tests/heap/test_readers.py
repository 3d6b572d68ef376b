"""Who counts holders waits for a thread that has a list of all objects."""

from tenure._heap import tracked_objects, wait_for_readers


def test_a_thread_that_reads_the_heap_is_waited_for(monkeypatch):
    heaps = [tracked_objects()]
    # what the thread does meanwhile: it comes to its end
    monkeypatch.setattr("tenure._heap._collector.sleep", lambda seconds: heaps.clear())
    assert wait_for_readers()
    assert not heaps
    assert not wait_for_readers()


def test_no_thread_is_waited_for_without_end(monkeypatch):
    heap = tracked_objects()
    monkeypatch.setattr("tenure._heap._collector.sleep", lambda seconds: None)
    assert not wait_for_readers(0.0)
    assert len(heap) > 0
