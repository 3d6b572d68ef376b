"""The thread that reads files, where Python or the system takes it away."""

import os
import threading

import pytest

# private: a program can't choose when a collection runs on its thread, nor when Python has no
# thread left
from tenure.paging._file_link import Reader


def test_an_error_stands_in_the_result_and_the_thread_goes_on():
    reader = Reader()
    failed, fine = reader.submit(lambda: 1 / 0), reader.submit(lambda: None)
    assert isinstance(failed.result().error, ZeroDivisionError)
    assert failed.result().error.__traceback__ is None
    assert fine.result().error is None
    assert failed.result().began_s <= failed.result().ended_s <= fine.result().began_s
    reader.close()


def test_its_own_thread_may_drain_and_close_it():
    """A garbage collection on the thread may end a model whose files it reads."""
    reader = Reader()
    done = reader.submit(lambda: (reader.drain(), reader.close()))
    assert done.result(timeout=10).error is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_reads_and_the_child_has_a_thread_of_its_own():
    reader, seen = Reader(), []
    gate = threading.Event()
    reader.submit(lambda: (gate.wait(10), seen.append(1)))
    threading.Timer(0.05, gate.set).start()
    child = os.fork()
    if not child:
        try:
            reader.submit(lambda: seen.append(2)).result(timeout=10)
            os._exit(0 if seen == [1, 2] else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert seen == [1]
    reader.close()
