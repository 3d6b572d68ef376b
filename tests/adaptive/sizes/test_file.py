"""Files of sizes: which paths and which contents can be used."""

import json
import os

import pytest

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError

pytestmark = pytest.mark.usefixtures("forgetful")

SIZE = {"site": "a", "signature": "grad", "ok": 1, "bad": 2, "device": None}


def content_of(*sizes):
    return json.dumps({"format": "tenure.adaptive sizes", "version": 1, "sizes": sizes})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe, folder, loop = tmp_path / "pipe", tmp_path / "folder", tmp_path / "loop"
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, folder, loop, tmp_path / "link"):
        with pytest.raises(AdaptiveUsageError, match=r"^save.* it is no regular file\.$"):
            adaptive.save(path)
    assert pipe.is_fifo()
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "folder", "loop", "link"}


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_goes_on_pointing_to_the_file_that_is_written(tmp_path, exists):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    if exists:
        (folder / "sizes.json").touch(mode=0o640)
    link.symlink_to(os.path.join("folder", "sizes.json"))
    adaptive.save(link)
    assert link.is_symlink()
    assert (folder / "sizes.json").read_text() == link.read_text() != ""
    assert [each.name for each in folder.iterdir()] == ["sizes.json"]
    adaptive.load(link)


def test_a_path_may_be_of_bytes(tmp_path):
    path = os.fsencode(tmp_path / "sizes.json")
    adaptive.save(path)
    adaptive.load(path)
    assert (tmp_path / "sizes.json").is_file()


@pytest.mark.parametrize("call", [adaptive.save, adaptive.load])
@pytest.mark.parametrize("path", [None, 5])
def test_what_is_no_path_is_refused(call, path):
    with pytest.raises(AdaptiveUsageError, match=rf"\(\) got {path}, which names no file\. Give"):
        call(path)


@pytest.mark.parametrize("call", [adaptive.save, adaptive.load])
def test_a_path_that_no_file_can_have_is_refused(call):
    with pytest.raises(AdaptiveUsageError, match=r"\(\) can't \w+ 'a\\x00b': .*null"):
        call("a\0b")


def test_a_file_that_is_nested_too_deeply_changes_nothing(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text("[" * 200_000)
    with pytest.raises(AdaptiveUsageError, match=r"^load.* Nothing was changed\."):
        adaptive.load(path)


def test_names_with_halves_of_characters_are_written_and_read_again(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(content_of(SIZE | {"site": "\ud800 ä", "device": "\udcff"}))
    adaptive.load(path)
    adaptive.save(path)
    written = path.read_text("utf-8")
    assert "ä" in written
    adaptive.reset()
    adaptive.load(path)
    adaptive.save(path)
    assert path.read_text("utf-8") == written
    assert json.loads(written)["sizes"][0]["site"] == "\ud800 ä"
