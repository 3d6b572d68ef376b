import errno
import os
import stat

import pytest
import torch

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
