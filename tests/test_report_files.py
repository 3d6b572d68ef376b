import errno
import os
import stat

import pytest
import torch

from tenure import _report_files
from tenure._errors import ReportFormatError
from tenure._report_files import read_facts, write_facts, write_whole
from tenure.profiler import Timeline
from tests.profiler.recording.makers import recording


def _timeline():
    with Timeline() as timeline:
        torch.ones(8)
    return timeline.report


WRITERS = {
    "run.tenure": lambda path: recording().save(path),
    "run.csv": lambda path: recording().export(path),
    "run.html": lambda path: recording().export(path),
    "run.json": lambda path: _timeline().export(path),
    "run.pickle": lambda path: _timeline().export(path),
}
every_writer = pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=list(WRITERS))


@every_writer
def test_a_disk_that_is_full_leaves_the_file_that_was_there(tmp_path, monkeypatch, name, write):
    path = tmp_path / name
    path.write_text("the last run")
    writing = os.fdopen

    def full(*args, **kwargs):
        file = writing(*args, **kwargs)
        file.write(b"the first of it")
        file.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_text() == "the last run"
    assert [*tmp_path.iterdir()] == [path]


@every_writer
def test_others_may_read_what_the_users_other_files_let_them(tmp_path, name, write):
    before = os.umask(0o027)
    try:
        write(tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_without_links_a_file_that_came_meanwhile_stays(tmp_path, monkeypatch):
    def no_links(*args):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "run.tenure"
    path.write_text("mine")
    assert write_whole(path, b"ours", replace=False) == tmp_path / "run.2.tenure"
    assert path.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.2.tenure", "run.tenure"]


def test_names_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(_report_files, "_MOST_NAMES", 2)
    path = tmp_path / "run.tenure"
    for name in ("run.tenure", "run.2.tenure"):
        assert write_whole(path, b"", replace=False).name == name
    with pytest.raises(FileExistsError, match="and 1 files beside it are there already"):
        write_whole(path, b"", replace=False)
    assert len([*tmp_path.iterdir()]) == 2


def test_the_umask_of_the_process_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", None)
    assert write_whole(tmp_path / "x", b"1").read_bytes() == b"1"


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_report_files, "_MOST_BYTES", 10)
    write_facts(tmp_path / "x", {"much": 12345})
    with pytest.raises(ReportFormatError, match="unpacks to more than 1 GiB"):
        read_facts(tmp_path / "x")
