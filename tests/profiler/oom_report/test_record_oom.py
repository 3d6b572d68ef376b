"""The recorder sees the first error, changes nothing, and says what it saw on one screen."""

import contextlib
import gc
import io
import json
import sys
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from tenure.adaptive import OutOfRetriesError, memory_budget, step
from tenure.profiler import OomReport, ProfilerUsageError, record_oom
from tests.programs import IMPORTED, run_program
from tests.threads import on_thread


def out_of_memory():
    return pytest.raises(torch.OutOfMemoryError)


@pytest.fixture
def recorder():
    with record_oom(quiet=True) as found:
        yield found


def pile_up(limit="1MiB"):
    # no other module that pytest imports has this name, which reports look up in all of them
    piled_up, net = [], nn.Identity()
    with memory_budget(limit):
        while True:
            piled_up.append(net(torch.ones(64, 1024)))


# --- what it says


@pytest.mark.slow
def test_an_error_that_the_program_handles_is_told_once_on_one_screen(monkeypatch):
    # memory from before the budget is not the cause, nor are gradients that wait in cycles
    gc.collect()
    old = [torch.ones(256, 1024) for _ in range(4)]
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with record_oom() as recorder:
        for _ in range(3):
            with out_of_memory():
                pile_up()
    assert stream.getvalue().count("Results pile up") == 1
    report = recorder.report
    assert (report.cause, report.device, report.requested_bytes) == ("results", "cpu", 262_144)
    assert report.first_line == (
        "Results pile up: piled_up[…] keeps 4 tensors, 1.0 MiB. Use chunked(collect=)."
    )
    assert report.site.endswith("in pile_up")
    assert (report.total_bytes, report.free_bytes) == (1 << 20, 0)
    assert 1 << 20 <= report.categories["other tensors"] < 2 << 20
    lines = str(report).split("\n")
    assert lines[0] == report.first_line
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    written = json.loads(json.dumps(report.to_dict()))
    assert written["format"] == "tenure.OomReport"
    assert OomReport.from_dict(written) == report
    assert len(old) == 4


def test_memory_that_nothing_was_found_in_has_no_known_cause():
    text = (
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "20.00 GB of which 0.50 GB is free. Including non-PyTorch memory, this "
        "process has 19.50 GB memory in use."
    )
    # what other tests left in cycles would be a cause
    gc.collect()
    with out_of_memory(), record_oom(quiet=True) as recorder:
        raise torch.OutOfMemoryError(text)
    report = recorder.report
    assert report.cause == "unknown"
    assert report.first_line == "Out of memory; too little was seen to tell why."
    # a GB of allocators is a GiB
    assert (report.requested_bytes, report.total_bytes) == (1 << 30, 20 << 30)


def test_an_error_of_a_worker_has_the_line_of_the_worker():
    text = (
        "Caught RuntimeError in DataLoader worker process 3.\nOriginal Traceback:\n"
        '  File "/lib/site-packages/torch/fetch.py", line 54, in fetch\n'
        '  File "/home/me/data.py", line 7, in __getitem__\n'
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    )
    with pytest.raises(RuntimeError), record_oom(quiet=True) as recorder:
        raise RuntimeError(text)
    assert recorder.report.first_line == (
        "Out of memory; in DataLoader worker 3 at data.py:7 in __getitem__, whose tensors are not "
        "seen here."
    )


# --- what it sees


def test_other_errors_are_no_news(recorder):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(ValueError, match="out of memory"):
        raise ValueError("out of memory")
    assert recorder.report is None
    assert repr(recorder).endswith("open>")


@pytest.mark.slow
def test_what_step_tries_again_is_no_news_and_what_it_gives_up_is():
    net = nn.Linear(64, 64)

    def loss_of(x):
        return net(x).square().sum()

    x = torch.ones(256, 64)
    with record_oom(quiet=True) as recorder, memory_budget("160KiB"):
        assert step(loss_of, x, loss="sum").attempts > 1
    assert recorder.report is None
    too_little = memory_budget("4KiB")
    with pytest.raises(OutOfRetriesError), record_oom(quiet=True) as recorder, too_little:
        step(loss_of, x, loss="sum")
    assert recorder.report is not None


def test_the_first_error_is_not_explained_again_where_it_ends_the_block_after_others():
    errors = []
    with out_of_memory(), record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        for n_mib in (64, 32):
            try:
                torch.empty(n_mib << 20, dtype=torch.uint8)
            except torch.OutOfMemoryError as error:
                errors.append(error)
        assert [each.requested_bytes >> 20 for each in recorder.reports] == [64, 32]
        raise errors[0]
    (report,) = recorder.reports
    assert report.requested_bytes == 64 << 20


def test_an_error_with_the_text_of_an_earlier_one_is_explained_as_well():
    def first():
        torch.empty(64 << 20, dtype=torch.uint8)

    def second():
        torch.empty(64 << 20, dtype=torch.uint8)

    with out_of_memory(), record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        with contextlib.suppress(torch.OutOfMemoryError):
            first()
        second()
    sites = [each.site for each in recorder.reports]
    assert [site.partition(" in ")[2].rpartition(".")[2] for site in sites] == ["first", "second"]


def test_the_report_says_that_later_errors_of_its_line_were_not_explained(recorder):
    notes = []
    for n_mib in (16, 32, 64):
        with out_of_memory(), memory_budget("8MiB"):
            torch.empty(n_mib << 20, dtype=torch.uint8)
        notes.append("Memory ran out again after this." in str(recorder.report))
    assert notes == [False, False, True]
    assert recorder.report.requested_bytes == 32 << 20


@pytest.mark.slow
def test_an_error_that_ends_the_program_is_explained_beside_the_first():
    done = run_program(
        """
import atexit, torch
from tenure.adaptive import memory_budget
from tenure.profiler import record_oom
recorder = record_oom()
atexit.register(lambda: print(len(recorder.reports), recorder.report.cause))
def work(n):
    parts = torch.ones(n, 1024)
    return parts * (parts + 1)
with memory_budget("6MiB"):
    try:
        work(1024)
    except RuntimeError:
        work(1000)
""",
        imported=IMPORTED,
        hides=True,
    )
    assert done.stdout == "2 traceback\n"
    assert done.returncode == 1
    first, second = (done.stderr.index(text) for text in ("Batch too large", "Kept exception"))
    assert first < second < done.stderr.index("Traceback (most recent call last)")


@pytest.mark.slow
def test_of_another_thread_what_nobody_handles_is_explained(monkeypatch):
    def work():
        raise MemoryError("no room")

    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with record_oom(quiet=True) as recorder:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(told) == 1
    assert recorder.report.error.startswith("MemoryError: no room")


# --- where little memory is left, and where the recorder fails


@pytest.mark.slow
def test_whatever_fails_in_the_recorder_the_error_is_the_programs(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("tenure.profiler._oom_report._facts.take_census", fail)
        with record_oom(quiet=True) as recorder, out_of_memory():
            pile_up()
    report = recorder.report
    assert report.notes == ("There was not enough memory left to look at the tensors.",)
    assert report.requested_bytes == 262_144
    for name in ("judge", "build", "oom_info"):
        monkeypatch.setattr(f"tenure.profiler._oom_report._recorder.{name}", fail)
        with record_oom(quiet=True), out_of_memory():
            pile_up()


# --- what it leaves as it was


def test_the_error_goes_on_as_the_same_object(recorder):
    class Broken(nn.Module):
        def forward(self, x):
            raise error

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.utils.checkpoint.checkpoint(Broken(), torch.ones(1), use_reentrant=False)
    assert caught.value is error
    assert (error.__cause__, error.__context__, hasattr(error, "__notes__")) == (None, None, False)
    # up to torch 2.12 the hooks of a checkpoint that raised stay on until its frames are cleared
    traceback.clear_frames(error.__traceback__)


def test_modes_hooks_and_the_default_device_stay_where_they_were():
    hooks = sys.excepthook, threading.excepthook
    device = torch.device("meta")
    with device:
        recorder = record_oom(quiet=True)
        assert sys.excepthook != hooks[0]
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    with device:
        recorder.close()
        assert torch.ones(1).device.type == "meta"
    assert (sys.excepthook, threading.excepthook) == hooks
    try:
        torch.set_default_device("meta")
        with record_oom(quiet=True):
            torch.set_default_device("cpu")
            torch.set_default_device("meta")
            torch.set_default_device(None)
            assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_another_thread_may_not_close_it(recorder):
    told = r"was closed on another thread than it was opened on, and stays open\."
    with pytest.raises(ProfilerUsageError, match=told):
        on_thread(recorder.close)


@pytest.mark.slow
def test_recording_keeps_no_tensor_alive(recorder):
    references = []

    def work():
        x = torch.ones(8)
        references.append(weakref.ref(x))
        with memory_budget("1KiB"):
            torch.ones(1 << 20)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    del caught
    gc.collect()
    assert recorder.report is not None
    assert references[0]() is None
