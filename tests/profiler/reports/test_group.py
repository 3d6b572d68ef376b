"""A report over the ranks of a process group: every rank has all reports, the first prints them."""

import io
import json

import pytest
import torch
from rich.console import Console

from tenure.profiler import DeviceReport, GroupReport, MemReport
from tests.programs import run_program

RANKS = """
import contextlib, datetime, io, json, os
import torch
import torch.distributed as dist
from tenure.profiler import MemReporter

other = os.fork()
rank, store = int(other == 0), os.environ["STORE"]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
model = torch.nn.Linear(8, 8 * (rank + 1), bias=False)
model(torch.ones(2, 8)).sum().backward()
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    found = MemReporter(model).report_group()
print(json.dumps({
    "rank": found.rank,
    "parameters": [report.categories["parameters"] for report in found.reports],
    "sum": found.categories["parameters"],
    "adds_up": found.total_bytes
    == sum(found.categories.values()) + found.unexplained_bytes
    == sum(report.total_bytes for report in found.reports),
    "printed": printed.getvalue() == (f"{found}\\n" if rank == 0 else ""),
}))
for _ in range(2):  # once for each thread of the group: a busy one may block its end for ever
    dist.barrier()
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_every_rank_gets_the_reports_of_all(tmp_path):
    done = run_program(RANKS, STORE=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    answers = {answer["rank"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    for rank in range(2):
        assert answers[rank] == {
            "rank": rank,
            "parameters": [256, 512],
            "sum": 768,
            "adds_up": True,
            "printed": True,
        }


def report_of(total_bytes, **categories):
    return MemReport((DeviceReport("cuda:0", (), categories, total_bytes, True, total_bytes),))


REPORT = GroupReport((report_of(1536, parameters=1024), report_of(2048, gradients=2048)), 1)

TEXT = """\
2 ranks, 3.5 KiB; the most on rank 1: 2.0 KiB
rank  parameters  gradients  unexplained    total
----  ----------  ---------  -----------  -------
1            0 B    2.0 KiB          0 B  2.0 KiB
0        1.0 KiB        0 B        512 B  1.5 KiB
all      1.0 KiB    2.0 KiB        512 B  3.5 KiB"""


def test_the_printed_table():
    assert str(REPORT) == TEXT
    assert repr(REPORT) == "<GroupReport of 2 ranks, 3.5 KiB; the most on rank 1: 2.0 KiB>"
    assert not REPORT.is_first


def test_rich_and_html_show_the_same_cells():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(REPORT)
    shown, page = console.export_text(), REPORT._repr_html_()
    for text in ("rank 1", "parameters", "unexplained", "3.5 KiB"):
        assert text in shown
        assert text in page


def test_the_dictionary_is_plain_data_and_adds_up():
    data = json.loads(json.dumps(REPORT.to_dict()))
    assert data["total_bytes"] == sum(data["categories"].values()) + data["unexplained_bytes"]
    assert [rank["total_bytes"] for rank in data["ranks"]] == [1536, 2048]


def test_a_single_process_is_a_group_of_one(tmp_path, capsys):
    from tenure.profiler import MemReporter

    store = tmp_path / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        found = MemReporter().report_group(device="cpu")
    finally:
        for _ in range(2):
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    assert len(found.reports) == 1
    assert capsys.readouterr().out == f"{found}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_prints(rank):
    assert GroupReport(REPORT.reports, rank).is_first is (rank == 0)


def test_a_category_that_only_one_rank_has_is_summed():
    paged = report_of(2048, parameters=1024, **{"paged: ring": 1024})
    group = GroupReport((report_of(512, parameters=512), paged), 0)
    assert group.categories["paged: ring"] == 1024
    assert group.categories["parameters"] == 1536
    assert sum(group.categories.values()) + group.unexplained_bytes == group.total_bytes
    columns = [line.split() for line in str(group).splitlines()]
    assert columns[-1] == ["all", "1.5", "KiB", "1.0", "KiB", "0", "B", "2.5", "KiB"]
