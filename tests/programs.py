"""Programs in processes of their own: what a test asks that can't be undone, or of a program's end.

Importing torch takes ten times as long as most of them, so they are forked from one process that
has it. What is to be imported in an order of its own needs a `subprocess` of its own.
"""

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

main = entry_points(group="console_scripts")["tenure"].load()
"""What the command `tenure` calls."""
_SERVER = Path(__file__).with_name("program_server.py")


class Done(NamedTuple):
    """How a program ended, as `subprocess.CompletedProcess` has it."""

    stdout: str
    stderr: str
    returncode: int


def run_program(
    program: str | Path, *, imported: tuple[str, ...] = (), hides: bool = False, **environment: str
) -> Done:
    """Run code, or the file of a path, with some variables of the environment.

    Args:
        program: what is run.
        imported: modules that it is forked with, besides those of all.
        hides: whether searches of the heap leave out what was imported, which takes them longest.
        **environment: the variables.
    """
    path, code = ("", program) if isinstance(program, str) else (str(program), program.read_text())
    with TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in ("stdout", "stderr")}
        request = {"code": code, "path": path, "environment": environment, "hides": hides}
        request |= {name: str(at) for name, at in outputs.items()}
        server = _server(*imported)
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        returncode = int(server.stdout.readline())
        return Done(*(at.read_text() for at in outputs.values()), returncode)


@cache
def _server(*imported: str) -> subprocess.Popen[str]:
    """Ends with this process, whose end of the pipe it reads.

    Without the folder of its file in the path, where `torch` names tests.
    """
    return subprocess.Popen(
        [sys.executable, "-P", str(_SERVER), *imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
