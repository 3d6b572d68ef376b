"""A program under `tenure run` is the program under `python`: its output, byte by byte, its end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tenure.profiler import Recording
from tests.programs import run_program


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
PROGRAMS = {
    "itself": f'"""Its words."""\n{_SELF}',
    "prints": "import sys; print('out'); print('err', file=sys.stderr); print('ünïcode ✓')",
    "raises": _FAILS,
    "raises a group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "raises with notes": "e = ValueError('x'); e.add_note('a note'); raise e",
    "exits with 3": "import sys; print('before'); sys.exit(3)",
    "exits with text": "import sys; sys.exit('the reason')",
    "exits with None": "import sys; sys.exit(None)",
    "exits with a tuple": "raise SystemExit((1, 2))",
    "exits with 300": "import sys; sys.exit(300)",
    "exits at once": "import os, sys; print('lost'); os._exit(7)",
    "exits in a finally": "import sys\ntry:\n    1 / 0\nfinally:\n    sys.exit(4)",
    "reads a missing file": "open('nowhere')",
    "has a syntax error": "print('never')\ndef f(:\n    pass\n",
    "is latin-1": b"# -*- coding: latin-1 -*-\nprint(ascii('\xe4'))\n",
    "is empty": "",
    "imports what fails": "import broken",
    "imports its neighbour": "import neighbour; print(neighbour.__file__, neighbour.main())",
    "has its own hook": (
        "import sys\ndef hook(kind, value, tb):\n"
        "    print(kind, value, tb.tb_frame.f_code.co_name, value.__traceback__ is tb)\n"
        "sys.excepthook = hook\n" + _FAILS
    ),
    "looks at its error at exit": (
        "import atexit, sys, traceback\n"
        "@atexit.register\ndef at_exit():\n"
        "    print(repr(sys.last_value), len(traceback.extract_tb(sys.last_traceback)))\n"
        "    print(sys.excepthook is sys.__excepthook__)\n" + _FAILS
    ),
    "registers exits": (
        "import atexit\natexit.register(print, 'first')\n"
        "atexit.register(lambda: print('second'))\nprint('main')"
    ),
    "fails at exit": "import atexit\natexit.register(lambda: 1 / 0)",
    "has a thread that outlives it": (
        "import threading, time\n"
        "def work():\n    time.sleep(0.2); print('worked', threading.main_thread().is_alive())\n"
        "threading.Thread(target=work).start()\nprint('main', threading.active_count())"
    ),
    "has a daemon": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "fails in a thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
        "t.start(); t.join(); print('goes on')"
    ),
    "deletes at the end": (
        "class Last:\n    def __del__(self): print('deleted', __name__)\nkept = Last()"
    ),
    "pickles its classes": (
        "import pickle\nclass Mine:\n    def __init__(self): self.x = 1\n"
        "print(pickle.loads(pickle.dumps(Mine())).x, Mine.__module__, pickle.dumps(Mine)[:30])"
    ),
    "forks": (
        "import os, sys\npid = os.fork()\nif not pid:\n    print('child', flush=True)\n"
        "    sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "forks a child that fails": (
        "import os, sys\npid = os.fork()\nif not pid:\n    1 / 0\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "starts processes by fork": (
        "import multiprocessing as mp\ndef work(x): print('worker', x, __name__); return x * 2\n"
        "if __name__ == '__main__':\n    with mp.get_context('fork').Pool(1) as pool:\n"
        "        print(pool.map(work, [1, 2]))"
    ),
    "starts processes by spawn": (
        "import multiprocessing as mp, sys\n"
        "def work(x): print('worker', x, __name__, sys.argv, flush=True); return x * 2\n"
        "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1, 2]))"
    ),
    "terminates a child": (
        "import multiprocessing as mp, time\nif __name__ == '__main__':\n"
        "    p = mp.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "    p.start(); p.terminate(); p.join(); print(p.exitcode)"
    ),
    "runs subprocesses": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv); sys.exit(6)']))"
    ),
    "interrupts itself": (
        "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGINT)"
    ),
    "catches its interrupt": (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    import time; time.sleep(5)\nexcept KeyboardInterrupt:\n    print('caught')"
    ),
    "is terminated": (
        "import os, signal, atexit\natexit.register(print, 'never')\n"
        "print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)"
    ),
    "handles SIGTERM": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(9))\n"
        "os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)"
    ),
    "aborts": "import os; os.abort()",
    "warns": "import warnings; warnings.warn('careful', DeprecationWarning); print(__file__)",
    "is run by asyncio": "import asyncio\nasync def f(): 1 / 0\nasyncio.run(f())",
    "recurses": "def f(): f()\ntry:\n    f()\nexcept RecursionError as e: print(type(e))",
    "closes its outputs": "import sys; sys.stdout.close(); sys.stderr.close()",
    "changes the folder": "import os; os.mkdir('deep'); os.chdir('deep'); print(os.getcwd())",
    "has dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from typing import get_type_hints\n"
        "@dataclass\nclass P:\n    x: P | None = None\nprint(P(), get_type_hints(P))"
    ),
}


class Ended(NamedTuple):
    stdout: bytes
    stderr: bytes
    returncode: int


def _run(command, folder, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        input=environment.pop("input", "").encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    return Ended(done.stdout, done.stderr, done.returncode)


def _without_addresses(ended):
    """Without what differs from process to process."""
    texts = (re.sub(rb"0x[0-9a-f]+", b"0x", text) for text in ended[:2])
    return Ended(*texts, ended.returncode)


def _forked(command, folder):
    """As `_run`, in a process that is forked with torch."""
    first = command[0] if command[0] == "-m" else Path(command[0])
    with contextlib.chdir(folder):
        done = run_program(first, *command[1:], imported=("torch._dynamo",))
    return Ended(done.stdout.encode(), done.stderr.encode(), done.returncode)


def _both(tmp_path, arguments, files, options=(), flags=(), run=_run, **environment):
    """How the same files end under Python and under `tenure run`, each in a folder of one name."""
    found = []
    for under, command in (
        ("python", [*flags, *arguments]),
        ("tenure", [*flags, "-m", "tenure", "run", "-q", *options, *arguments]),
    ):
        # one and the same path, as it stands in tracebacks
        folder = tmp_path / "here"
        folder.mkdir()
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True, parents=True)
            if isinstance(text, bytes):
                file.write_bytes(text)
            else:
                file.write_text(text, "utf-8")
        found.append(_without_addresses(run(command, folder, **environment)))
        folder.rename(tmp_path / under)
    return found


_FILES = {
    "broken.py": "def f():\n    raise ImportError('in here')\nf()\n",
    "neighbour.py": "import sys\ndef main(): return sys.modules['__main__'].__name__\n",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_script_does_what_it_does_under_python(program, tmp_path):
    arguments = ["program.py", "a", "--budget", "-o", "x"]
    python, tenure = _both(tmp_path, arguments, {**_FILES, "program.py": program})
    assert tenure == python


@pytest.mark.parametrize("name", ["itself", "raises", "exits with text", "imports what fails"])
def test_a_module_does_what_it_does_under_python(name, tmp_path):
    arguments = ["-m", "pack.age", "-x", "--leaks"]
    files = {**_FILES, "pack/__init__.py": "", "pack/age.py": PROGRAMS[name]}
    python, tenure = _both(tmp_path, arguments, files)
    assert tenure == python


@pytest.mark.parametrize("name", ["itself", "raises", "exits with 3", "interrupts itself"])
def test_code_does_what_it_does_under_python(name, tmp_path):
    python, tenure = _both(tmp_path, ["-c", PROGRAMS[name], "-q", "b"], _FILES)
    if sys.version_info >= (3, 13) and b"Traceback" in python.stderr:
        pytest.skip("Python 3.13 keeps the source of -c for tracebacks in a way of its own")
    assert tenure == python


def test_the_standard_input_does_what_it_does_under_python(tmp_path):
    python, tenure = _both(tmp_path, ["-", "a"], {}, input=_SELF + _FAILS)
    assert tenure == python


def test_a_folder_does_what_it_does_under_python(tmp_path):
    files = {"app/__main__.py": _SELF + _FAILS, "app/other.py": ""}
    python, tenure = _both(tmp_path, ["app", "a"], files)
    assert tenure == python


def test_a_zip_file_does_what_it_does_under_python(tmp_path):
    made = tmp_path / "made.zip"
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("__main__.py", _SELF + _FAILS)
    python, tenure = _both(tmp_path, ["app.zip", "a"], {"app.zip": made.read_bytes()})
    assert tenure == python


def test_a_script_in_a_folder_elsewhere_and_by_a_link_does_what_it_does_under_python(tmp_path):
    for arguments in (["./deep/program.py"], ["deep/../deep/program.py"]):
        python, tenure = _both(tmp_path, arguments, {"deep/program.py": _SELF})
        assert tenure == python
        for name in ("python", "tenure"):
            (tmp_path / name).rename(tmp_path / f"{name} {len(arguments[0])}")


@pytest.mark.parametrize("flags", [["-P"], ["-X", "dev"], ["-W", "error"], ["-O"]], ids=str)
def test_options_of_python_stay(flags, tmp_path):
    program = _SELF + "import warnings\nassert __debug__, 1\nwarnings.warn('x')"
    python, tenure = _both(
        tmp_path, ["program.py"], {"program.py": program}, flags=flags,
        PYTHONPATH=os.pathsep.join(sys.path[1:]) if flags == ["-P"] else "",
    )  # fmt: skip
    assert tenure == python


def test_a_module_that_is_missing_is_told_as_python_tells_it(tmp_path):
    python, tenure = _both(tmp_path, ["-m", "nowhere.at.all"], {})
    assert tenure == python
    assert tenure.returncode == 1


def test_a_script_that_is_missing_is_refused_in_one_line(tmp_path):
    python, tenure = _both(tmp_path, ["missing.py"], {})
    assert tenure.returncode == python.returncode == 2
    assert tenure.stdout == b""
    assert tenure.stderr.count(b"\n") == 1
    at = os.fspath(tmp_path / "here" / "missing.py").encode()
    told = b"can't open file '" + at + b"': [Errno 2] No such file or directory"
    assert told in tenure.stderr
    assert told in python.stderr
    assert list((tmp_path / "tenure").iterdir()) == []


def test_control_c_of_a_terminal_ends_it_as_under_python(tmp_path):
    program = tmp_path / "program.py"
    # one long sleep might begin just after the signal, and nothing would end it
    program.write_text("import time\nwhile not print('ready', flush=True): time.sleep(0.05)\n")
    ends = []
    for command in ([], ["-m", "tenure", "run", "-q"]):
        process = subprocess.Popen(
            [sys.executable, *command, os.fspath(program)],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        # whether the first call of the line had returned when the signal came is chance
        ends.append((process.returncode, re.sub(rb"(?m)^ +\^+\n", b"", told)))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT
    assert Recording.load(tmp_path / "program.tenure").ended == "KeyboardInterrupt"


_ENDS = {
    "is empty": ("exit code 0", 0),
    "raises": ("KeyError: 'no such thing'", 1),
    "exits with 3": ("exit code 3", 3),
    "exits with text": ("exit code 1 (the reason)", 1),
    "exits with 300": ("exit code 44", 44),
    "interrupts itself": ("KeyboardInterrupt", 130),
    "is terminated": ("SIGTERM", 143),
    "handles SIGTERM": ("exit code 9", 9),
    "has a syntax error": ("SyntaxError: invalid syntax", 1),
    "changes the folder": ("exit code 0", 0),
    "forks a child that fails": ("exit code 0", 0),
    "starts processes by spawn": ("exit code 0", 0),
    "terminates a child": ("exit code 0", 0),
}


@pytest.mark.parametrize("name", _ENDS)
def test_the_recording_says_how_it_ended(name, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    done = _run(["-m", "tenure", "run", "program.py", "--x"], tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {"deep"} == {"program.py", "program.tenure"}
    found = Recording.load(tmp_path / "program.tenure")
    assert (found.ended, found.exit_code) == _ENDS[name]
    assert found.exit_code in (done.returncode, 128 - done.returncode)
    assert found.command == ("python", "program.py", "--x")
    assert found.notes == ("the program did not import torch",)
    told = done.stderr.decode().splitlines()[-1]
    assert told == "Wrote program.tenure. See it with: tenure report program.tenure"


def test_nothing_is_written_where_a_process_ends_itself_at_once(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS["exits at once"])
    done = _run(["-m", "tenure", "run", "program.py"], tmp_path)
    assert (done.returncode, done.stderr) == (7, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.slow
def test_a_program_sets_up_torch_by_the_environment_before_it_imports_it(tmp_path):
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os, sys
            assert "torch" not in sys.modules
            os.environ["OMP_NUM_THREADS"] = "7"
            import torch
            print(torch.get_num_threads(), type(torch.__spec__).__name__, vars(torch.__loader__))
            """
        )
    )
    ends = [_run([*c, "program.py"], tmp_path) for c in ([], ["-m", "tenure", "run", "-q"])]
    assert ends[0] == ends[1]
    assert Recording.load(tmp_path / "program.tenure").versions.keys() >= {"torch"}


@pytest.mark.slow
def test_an_error_under_a_budget_is_told_without_what_counts(tmp_path):
    program = """
        import torch
        class Mine(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x @ torch.ones(2, 3)
        try:
            Mine.apply(torch.ones(4, 5))
        except RuntimeError:
            torch.nn.Linear(3, 3)(torch.ones(2, 2))
        """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    run = ["-m", "tenure", "run", "-q", "--budget", "1GiB", "--leaks"]
    ends = [_forked([*command, "program.py"], tmp_path) for command in ([], run)]
    assert b"Mine.apply" in ends[0].stderr
    assert ends[0] == ends[1]


_WARNS = """
import re, warnings
import torch
import torch.nn.functional as F

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
resized()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--on-oom", "--timeline"], []], ids=["operations", "by default"]
)
def test_what_torch_warns_of_is_put_down_to_the_line_of_the_program(options, tmp_path):
    python, tenure = _both(tmp_path, ["program.py"], {"program.py": _WARNS}, options, run=_forked)
    assert tenure == python
    assert b"'program.py', 7" in python.stdout


@pytest.mark.slow
def test_errors_that_a_program_prints_have_no_frame_of_what_waits_for_them(tmp_path):
    program = """
        import torch, traceback
        for fails in (
            lambda: torch.ones(2) + torch.ones(3),
            lambda: torch.nn.Linear(2, 3)(torch.ones(4, 5)),
        ):
            try:
                fails()
            except RuntimeError:
                traceback.print_exc()
        torch.nn.Linear(2, 3)(torch.ones(4, 5))
        """
    files = {"program.py": textwrap.dedent(program)}
    python, tenure = _both(tmp_path, ["program.py"], files, ["--on-oom"], run=_forked)
    assert tenure == python
    assert b"in <lambda>" in python.stderr
