"""Functions that run on several ranks at once, in processes forked from one that has torch.

Each rank leaves by `os._exit`: a group of gloo that is destroyed right after a collective may wait
for ever. Who is not done in time is killed, and the test fails with what all have said.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.programs import IMPORTED, run_program
from tests.small_heap import hide

_ROOT = Path(__file__).parents[3]
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.adaptive.ranks.launch import launch
launch({module!r}, {function!r}, {options!r}, {n}, {folder!r}, {timeout}, {has_end})
"""


def run_ranks(function, n=2, *, timeout=60, has_end=True, **options):
    """What a function of a module gives on each of ``n`` ranks; None where one was killed.

    Args:
        function: gets its rank and the options; what it returns has to be JSON.
        n: how many ranks.
        timeout: seconds after which all are killed, and a test fails.
        has_end: whether all are there at the end, and wait for each other.
        **options: plain values.
    """
    with TemporaryDirectory() as folder:
        done = run_program(
            _PROGRAM.format(
                root=str(_ROOT), module=function.__module__, function=function.__name__,
                options=options, n=n, folder=folder, timeout=timeout, has_end=has_end,
            ),
            imported=IMPORTED,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        found = [Path(folder, f"{rank}.json") for rank in range(n)]
        return [json.loads(each.read_text()) if each.exists() else None for each in found]


def run_checks(*checks, n=2, timeout=120):
    """Run checks, functions of one module that get their rank and assert, in one start of ranks."""
    names = [check.__name__ for check in checks]
    run_ranks(all_of, n, timeout=timeout, home=checks[0].__module__, names=names)


def all_of(rank, home, names):
    from tenure.adaptive import reset

    for name in names:
        reset()
        getattr(importlib.import_module(home), name)(rank)


def launch(module, function, options, n, folder, timeout, has_end):
    work = getattr(importlib.import_module(module), function)
    # each rank would look at all that is imported, and so copy it, wherever it makes room
    hide()
    pids = {}
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            os._exit(_run(work, options, rank, n, folder, timeout, has_end))
        pids[pid] = rank
    deadline, failed = time.monotonic() + timeout, []
    while pids:
        for pid, rank in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[pid]
                code = os.waitstatus_to_exitcode(status)
                # a test that kills a rank expects that
                if code not in (0, -signal.SIGKILL):
                    failed.append((rank, code))
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            print(f"ranks {sorted(pids.values())} were not done after {timeout} s", file=sys.stderr)
            sys.exit(1)
        time.sleep(0.005)
    if failed:
        print(f"ranks and their exit codes: {failed}", file=sys.stderr)
        sys.exit(1)


def _run(work, options, rank, n, folder, timeout, has_end):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        result = work(rank, **options)
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        # nobody leaves while another still reads what it has sent
        if has_end:
            dist.barrier()
        code = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
