"""Files of reports: written whole or not at all, and refused if they unpack to too much.

By private names where the ways to write that users have would choose the name, or take long.
"""

import errno
import gzip
import os
import stat
import tracemalloc

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
    "run.html": lambda path: recording().export(path),
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


@pytest.mark.parametrize(("name", "most"), [("_MOST_BYTES", 10), ("_MOST_VALUES", 3)])
def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, name, most):
    monkeypatch.setattr(_report_files, name, most)
    write_facts(tmp_path / "x", {"much": [1, 2, 3]})
    with pytest.raises(ReportFormatError, match="x is refused: it unpacks to more than"):
        read_facts(tmp_path / "x")


def test_a_small_file_of_very_many_values_takes_little_memory(tmp_path):
    path = tmp_path / "x"
    with gzip.open(path, "wb", 1) as file:
        file.writelines([b"["] + [b"[]," * 333_333] * 20 + [b"0]"])
    tracemalloc.start()
    try:
        with pytest.raises(ReportFormatError, match="more than 10,000,000 values"):
            read_facts(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / f"{'n' * 248}.tenure"
    for replace in (False, True):
        assert write_whole(path, b"1", replace=replace) == path
    assert path.read_bytes() == b"1"


def test_a_file_is_never_there_before_it_is_whole(tmp_path, monkeypatch):
    seen = []

    def watched(does):
        def run(*args, **kwargs):
            seen.extend(path.read_bytes() for path in tmp_path.glob("run*"))
            return does(*args, **kwargs)

        return run

    for name in ("link", "replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    write_whole(tmp_path / "run.tenure", b"1", replace=False)
    write_whole(tmp_path / "run.tenure", b"2", replace=False)
    assert set(seen) == {b"1", b"2"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.2.tenure", "run.tenure"]


def test_a_link_to_a_file_stays_one(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    link, loose = tmp_path / "link", tmp_path / "loose"
    link.symlink_to("real")
    loose.symlink_to("new")
    for path, target in ((link, "real"), (loose, "new")):
        write_whole(path, b"1")
        assert path.is_symlink()
        assert (tmp_path / target).read_bytes() == b"1"


def test_a_pipe_is_left_as_it_is(tmp_path):
    path, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(path)
    link.symlink_to("pipe")
    for each in (path, link):
        with pytest.raises(FileExistsError, match="a device or a pipe, and no file"):
            write_whole(each, b"1")
        assert stat.S_ISFIFO(each.stat().st_mode)
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "link"}
