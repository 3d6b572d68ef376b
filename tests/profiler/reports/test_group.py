"""A report over the ranks of a process group: every rank has all reports, the first prints them."""

import json

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
with open(f"{store}-{rank}.json", "w") as file:
    json.dump({
        "parameters": [found[i].categories["parameters"] for i in range(2)],
        "printed": printed.getvalue().count("rank "),
    }, file)
for _ in range(2):  # once for each thread of the group: a busy one may block its end for ever
    dist.barrier()
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_every_rank_gets_the_reports_of_all(tmp_path):
    done = run_program(RANKS, STORE=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        # stdout is shared by both ranks, and in torch 2.10 by gloo
        answer = json.loads((tmp_path / f"store-{rank}.json").read_text())
        assert answer == {
            "parameters": [256, 512],
            "printed": 2 if rank == 0 else 0,
        }
