"""A program under `tenure run` is the program under `python`: its output, byte by byte, its end."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tenure.profiler import Recording
from tests.programs import IMPORTED, Done, run_program


@pytest.fixture(autouse=True, scope="module")
def _interrupts():
    """What Ctrl-C does where nobody has set it aside, as a shell does for what it runs behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_SELF = """
import sys
main = sys.modules["__main__"]
print(sys.argv, sys.path, sys.flags.safe_path)
print(sorted(vars(main)), vars(main) is globals(), __name__, __doc__, __package__, __builtins__)
print(globals().get("__file__"), globals().get("__cached__"), globals().get("__annotations__"))
print(type(__loader__), getattr(__loader__, "path", __loader__), globals().get("__spec__"))
print(sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile(), sys.stdin.isatty())
"""
_FAILS = """
def inner(x):
    return 1 / x
def outer():
    try:
        inner(0)
    except ZeroDivisionError as error:
        raise KeyError("no such thing") from error
outer()
"""
_DOES_MUCH = """
from __future__ import annotations
import atexit, os, pickle, signal, sys, time, warnings
from dataclasses import dataclass
from typing import get_type_hints
import neighbour
print('out'); print('err', file=sys.stderr); print('ünïcode ✓')
print(neighbour.__file__, neighbour.main(), 'torch' in sys.modules)
warnings.warn('careful', DeprecationWarning)
@dataclass
class P:
    x: P | None = None
    def __del__(self):
        print('deleted', __name__)
print(P(), get_type_hints(P), pickle.loads(pickle.dumps(P)), pickle.dumps(P)[:30])
def f():
    f()
try:
    f()
except RecursionError as e:
    print(type(e))
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print('caught')
os.mkdir('deep')
os.chdir('deep')
print(os.getcwd())
kept = P()
atexit.register(print, 'first')
atexit.register(lambda: print('second'))
atexit.register(lambda: 1 / 0)
"""
_HAS_CHILDREN = """
import multiprocessing as mp, os, subprocess, sys, time
def work(x):
    print('worker', x, __name__, sys.argv, flush=True)
    return x * 2
if __name__ == '__main__':
    for end in (lambda: sys.exit(5), lambda: 1 / 0):
        pid = os.fork()
        if not pid:
            end()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    for method in ('fork', 'spawn'):
        with mp.get_context(method).Pool(1) as pool:
            print(pool.map(work, [1, 2]), flush=True)
    p = mp.get_context('fork').Process(target=time.sleep, args=(60,))
    p.start(); p.terminate(); p.join(); print(p.exitcode, flush=True)
    print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv); sys.exit(6)']))
"""
_HAS_THREADS = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
t = threading.Thread(target=lambda: 1 / 0, name='worker')
t.start(); t.join(); print('goes on')
def work():
    time.sleep(0.2); print('worked', threading.main_thread().is_alive())
    sys.stdout.close(); sys.stderr.close()
threading.Thread(target=work).start()
print('main', threading.active_count())
"""
# each with the end that its recording tells, and its exit code; None if there is no recording
PROGRAMS = {
    "is itself": (f'"""Its words."""\n{_SELF}', "exit code 0", 0),
    "does what programs do": (_DOES_MUCH, "exit code 0", 0),
    "has children": (_HAS_CHILDREN, "exit code 0", 0),
    "has threads": (_HAS_THREADS, "exit code 0", 0),
    "raises": (_FAILS, "KeyError: 'no such thing'", 1),
    "exits with text": (
        "import sys; print('lost', end=''); sys.exit('the reason')",
        "exit code 1 (the reason)",
        1,
    ),
    "exits at once": ("import os, sys; print('lost'); os._exit(7)", None, 7),
    "has a syntax error": ("print('never')\ndef f(:\n    pass\n", "SyntaxError: invalid syntax", 1),
    "is latin-1": (b"# -*- coding: latin-1 -*-\nprint(ascii('\xe4'))\n", "exit code 0", 0),
    "imports what fails": ("import broken", "ImportError: in here", 1),
    "has its own hook": (
        "import sys\ndef hook(kind, value, tb):\n"
        "    print(kind, value, tb.tb_frame.f_code.co_name, value.__traceback__ is tb)\n"
        "sys.excepthook = hook\n" + _FAILS,
        "KeyError: 'no such thing'",
        1,
    ),
    "interrupts itself": (
        "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGINT)",
        "KeyboardInterrupt",
        130,
    ),
    "is terminated": (
        "import os, signal, atexit\natexit.register(print, 'never')\n"
        "print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)",
        "SIGTERM",
        143,
    ),
    "handles SIGTERM": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(9))\n"
        "os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)",
        "exit code 9",
        9,
    ),
}


def _run(command, folder, **environment):
    """How it ends, without the addresses, which differ from process to process."""
    given = environment.pop("input", "")
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **environment},
        input=given.encode(), capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    texts = (re.sub(rb"0x[0-9a-f]+", b"0x", text).decode() for text in (done.stdout, done.stderr))
    return Done(*texts, done.returncode)


def _forked(command, folder):
    """As `_run`, in a process that is forked with torch."""
    first = command[0] if command[0] == "-m" else Path(command[0])
    with contextlib.chdir(folder):
        return run_program(first, *command[1:], imported=IMPORTED)


def _both(tmp_path, arguments, files, options=(), flags=(), run=_run, **environment):
    """How the same files end under Python and under `tenure run`, each in a folder of one name."""
    found = []
    for under, words in (("python", ()), ("tenure", ("-m", "tenure", "run", "-q", *options))):
        command = [*flags, *words, *arguments]
        # one and the same path, as it stands in tracebacks
        folder = tmp_path / "here"
        folder.mkdir()
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        found.append(run(command, folder, **environment))
        folder.rename(tmp_path / under)
    return found


_FILES = {
    "broken.py": "def f():\n    raise ImportError('in here')\nf()\n",
    "neighbour.py": "import sys\ndef main(): return sys.modules['__main__'].__name__\n",
}


@pytest.mark.parametrize(("program", "ended", "code"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_script_does_what_it_does_under_python_and_its_end_is_told(
    program, ended, code, tmp_path
):
    arguments = ["program.py", "a", "--budget", "-o", "x"]
    python, tenure = _both(tmp_path, arguments, {**_FILES, "program.py": program})
    assert tenure == python
    written = [path.name for path in tmp_path.glob("tenure/*.tenure")]
    assert written == ["program.tenure"] * (ended is not None)
    if written:
        found = Recording.load(tmp_path / "tenure" / "program.tenure")
        assert (found.ended, found.exit_code) == (ended, code)
        assert found.exit_code in (tenure.returncode, 128 - tenure.returncode)
        assert found.command == ("python", *arguments)
        assert found.notes == ("the program did not import torch",)


def _zipped(text):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("__main__.py", text)
    return made.getvalue()


_SELF_AND_FAILS = _SELF + _FAILS


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["-m", "pack.age", "-x"], {"pack/__init__.py": "", "pack/age.py": _SELF_AND_FAILS}),
        # from Python 3.13 on, tracebacks keep the source of -c in a way of their own
        (["-c", _SELF, "-q", "b"], {}),
        (["app", "a"], {"app/__main__.py": _SELF_AND_FAILS, "app/other.py": ""}),
        (["app.zip", "a"], {"app.zip": _zipped(_SELF_AND_FAILS)}),
        (["deep/../deep/program.py"], {"deep/program.py": _SELF}),
        (["-m", "nowhere.at.all"], {}),
        (["-m", "pytest", "-qq", "-W", "error"], {"test_it.py": "def test(): pass"}),
    ],
    ids=["module", "code", "folder", "zip", "path", "missing", "pytest"],
)
def test_whatever_is_run_does_what_it_does_under_python(arguments, files, tmp_path):
    python, tenure = _both(tmp_path, arguments, files)
    assert tenure == python


@pytest.mark.parametrize("flags", [["-P"], ["-X", "dev", "-O", "-W", "error"]], ids=str)
def test_options_of_python_stay(flags, tmp_path):
    program = _SELF + "import warnings\nassert __debug__, 1\nwarnings.warn('x')"
    python, tenure = _both(
        tmp_path, ["program.py"], {"program.py": program}, flags=flags,
        PYTHONPATH=os.pathsep.join(sys.path[1:]) if flags == ["-P"] else "",
    )  # fmt: skip
    assert tenure == python


def test_a_script_that_is_missing_is_refused_in_one_line(tmp_path):
    python, tenure = _both(tmp_path, ["missing.py"], {})
    assert tenure.returncode == python.returncode == 2
    assert (tenure.stdout, tenure.stderr.count("\n")) == ("", 1)
    at = tmp_path / "here" / "missing.py"
    told = f"can't open file '{at}': [Errno 2] No such file or directory"
    assert told in tenure.stderr
    assert told in python.stderr
    assert list((tmp_path / "tenure").iterdir()) == []


_OF_TORCH = """
import re, traceback, warnings
import torch
import torch.nn.functional as F

print(type(torch.__spec__).__name__, vars(torch.__loader__))

def resized():
    torch.add(torch.ones(2), torch.ones(2), out=torch.ones(1))

def warned():
    (torch.ones(2, 3, requires_grad=True) * 2).grad
    F.mse_loss(torch.ones(2), torch.ones(3, 2))
    F.softmax(torch.ones(2, 2))
    resized()

warned()
warned()
print(len(__warningregistry__))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    resized()
print([(re.sub(".*/", "", each.filename), each.lineno) for each in seen])
warnings.filterwarnings("error", module="tenure")
resized()
warnings.filterwarnings("ignore", module="__main__")
resized()
warnings.filterwarnings("error", module="__main__")
try:
    resized()
except UserWarning as error:
    print(type(error))

class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ torch.ones(2, 3)

try:
    torch.ones(2) + torch.ones(3)
except RuntimeError:
    {handle}
try:
    Mine.apply(torch.ones(4, 5))
except RuntimeError:
    torch.nn.Linear(2, 3)(torch.ones(4, 5))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "handle"),
    [
        ([], "traceback.print_exc()"),
        (["--on-oom"], "traceback.print_exc()"),
        # with a mode, an error that the program itself prints has its frames
        (["--on-oom", "--timeline", "--budget", "1GiB", "--leaks"], "pass"),
    ],
    ids=str,
)
def test_warnings_and_errors_of_torch_have_the_lines_of_the_program_alone(
    options, handle, tmp_path
):
    files = {"program.py": _OF_TORCH.replace("{handle}", handle)}
    python, tenure = _both(tmp_path, ["program.py"], files, options, run=_forked)
    assert tenure == python
    assert "'program.py', 9" in python.stdout
    assert "Mine.apply" in python.stderr
