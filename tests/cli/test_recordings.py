"""The verbs that read recordings: what they print, as text and JSON, and what they refuse."""

import gzip
import io
import json
import os
import subprocess
import sys

import pytest

from tenure.profiler import Recording, RecordingDiff
from tests.profiler.recording.makers import (
    MIB,
    block,
    growth,
    pickled,
    recording,
    torch_snapshot,
    track,
)
from tests.programs import main

FRAGMENTED = """\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.34 GiB. GPU
0 has a total capacity of 23.65 GiB of which 812.44 MiB is free. Process 31337 has
22.82 GiB memory in use. Of the allocated memory 15.91 GiB is allocated by PyTorch,
and 6.40 GiB is reserved by PyTorch but unallocated.\x1b[0m""".replace("\n", " ")
OOM_LOG = (
    "a log of an out-of-memory error of cuda:0, which does not tell what was in memory. The likely "
    "cause is fragmentation: 6.4 GiB were reserved and unused. Set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True. Record the program: tenure run SCRIPT."
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at_peak = [block(3 * MIB, "train.py:3 in f")]
    recording(tracks=(track("cpu", MIB, 3 * MIB, at_peak=at_peak),)).save("a.tenure")
    recording(growth=(growth(),), peaks={"cpu": 6 * MIB}, rank=1).save("b.tenure")
    pickled(tmp_path / "snapshot.pickle", torch_snapshot())
    (tmp_path / "text.txt").write_text("nothing")
    (tmp_path / "error.log").write_text("Traceback (most recent call last):\n  File ...")
    (tmp_path / "oom.log").write_text(f"\x1b[31mTraceback (most recent call last):\n{FRAGMENTED}")
    os.mkfifo("pipe")
    os.symlink("pipe", "to_pipe")
    return tmp_path


def _printed(command, capsys, code=0):
    assert main(command.split()) == code
    return capsys.readouterr()


@pytest.mark.parametrize(
    "command",
    [
        "report a.tenure",
        "report a.tenure b.tenure",
        "tree a.tenure",
        "tree snapshot.pickle",
        "leaks b.tenure",
        "diff a.tenure snapshot.pickle",
    ],
)
def test_every_verb_prints_eighty_columns_and_json(command, files, capsys):
    out, err = _printed(command, capsys)
    assert err == ""
    assert out.strip()
    assert max(map(len, out.splitlines())) <= 80
    out, err = _printed(f"{command} --json", capsys)
    assert err == ""
    assert json.loads(out)["format"].startswith("tenure.Record")


def test_json_reads_back(files, capsys):
    first, second = (Recording.load(name) for name in ("a.tenure", "b.tenure"))
    for kind, verb, expected in (
        (Recording, "report a.tenure", first),
        (RecordingDiff, "diff a.tenure b.tenure", RecordingDiff.of(first, second)),
    ):
        out = _printed(f"{verb} --json", capsys).out
        assert kind.from_dict(json.loads(out)) == expected


def test_leaks_names_the_variable_and_says_if_nobody_looked(files, capsys):
    lines = _printed("leaks b.tenure", capsys).out.splitlines()
    assert lines[0] == "What grew"
    assert lines[1].startswith("- losses grew by 6 tensors, 24 B")
    told = _printed("leaks a.tenure", capsys).out
    assert told.startswith("No growth to judge: no optimizer made a step, and no model was called.")
    assert told.endswith(" Nothing outlived a scope that reports.\n")
    recording(seeks_leaks=False).save("c.tenure")
    for name in ("c.tenure", "snapshot.pickle"):
        told = _printed(f"leaks {name}", capsys).out
        assert told == "Leaks were not recorded. Run with --leaks to look for them.\n"


def test_export_writes_by_extension_and_overwrites_when_told(files, capsys):
    for name in ("x.json", "x.html"):
        out, err = _printed(f"export a.tenure -o {name}", capsys)
        assert (out, err) == ("", f"Wrote {name}\n")
        assert (files / name).stat().st_size
    (files / "x.json").write_text("mine")
    told = _printed("export a.tenure -o x.json", capsys, code=2).err
    assert told == (
        "tenure export: error: x.json is there already, and was left as it is. Overwrite it with "
        "-f, or name another file with -o.\n"
    )
    assert (files / "x.json").read_text() == "mine"
    out = _printed("export a.tenure -f --json -o x.json", capsys).out
    assert json.loads(out) == {"written": "x.json", "n_bytes": (files / "x.json").stat().st_size}
    told = _printed("export a.tenure -o y.trace.json", capsys, code=2).err
    assert "y.trace.json asks for live bytes over time, and there is no timeline" in told


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("report nowhere", "nowhere can't be read: No such file or directory."),
        ("report .", ". can't be read: Is a directory."),
        ("tree text.txt", "text.txt is no file of tenure, or it is damaged"),
        ("report error.log", "error.log is a traceback, which does not tell what was in"),
        ("report oom.log", f"oom.log is {OOM_LOG}"),
        ("tree b.tenure", "The recording tells of no memory"),
        ("diff a.tenure text.txt", "text.txt is no file of tenure"),
        ("export a.tenure -o x.xlsx", "export() got 'x.xlsx', and there is no format for that"),
        ("export a.tenure -o no/x.html", "There is no folder no. Make it"),
        ("export a.tenure -o to_pipe", "to_pipe is a device or a pipe, and was left"),
        ("run -f -o pipe text.txt", "pipe is a device or a pipe, and was left"),
        (f"run -o {'n' * 256} text.txt", f"{'n' * 256} can't be written: File name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, complaint, files, capsys):
    out, err = _printed(arguments, capsys, code=2)
    assert out == ""
    assert err.startswith(f"tenure {arguments.split()[0]}: error: {complaint}")
    assert err.count("\n") == 1


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\U000e0041" * 20_000


def _altered(**facts):
    return gzip.compress(json.dumps({**recording().to_dict(), **facts}).encode())


@pytest.mark.parametrize(
    "data",
    [b"\x80\x04c" + HOSTILE.encode() + b"\nx\n.", _altered(peaks={HOSTILE: "much"})],
    ids=["name in a pickle", "key"],
)
def test_what_a_file_says_commands_no_terminal_in_an_error(data, files, capsys):
    (files / "x").write_bytes(data)
    err = _printed("report x", capsys, code=2).err
    assert err.startswith("tenure report: error: x")
    assert err.removesuffix("\n").isprintable()
    assert len(err) < 20_000


def test_a_terminal_without_blocks_gets_all_else(files, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["diff", "a.tenure", "b.tenure"]) == 0
    stream.flush()
    assert b"6.0 MiB" in stream.buffer.getvalue()


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(files):
    command = [sys.executable, "-m", "tenure", "report", "a.tenure"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()
