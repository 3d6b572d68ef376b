"""`tenure run`: its options, what it records, and where it writes.

Some programs replace a private name, because a signal has to come at one exact moment.
"""

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tenure.profiler import Recording
from tests.programs import IMPORTED, main, run_program, run_python


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def _run(program, *options, rest=(), code=0, **environment):
    """Run a program of its own file; one with torch in a process that is forked with it."""
    Path("train.py").write_text(textwrap.dedent(program))
    command = ("-m", "tenure", "run", *options, "train.py", *rest)
    if "torch" in program:
        done = run_program(*command, imported=IMPORTED, hides=True, **environment)
    else:
        done = run_python(*command, **environment)
    assert done.returncode == code, done.stderr
    return done


def _recorded():
    return Recording.load("train.tenure")


TRAINING = """
    import signal, sys, threading, time
    import torch
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def train(n_steps=8):
        losses = []
        for _ in range(n_steps):
            loss = model(torch.ones(64, 64)).square().mean()
            losses.append(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    """


def test_a_planted_leak_and_the_peak_are_told_in_a_line_each():
    done = _run(TRAINING + "large = torch.ones(5 << 20)\n    train()", "--leaks", "--timeline")
    (found,) = _recorded().growth
    line = "train.<locals>.losses grew by 7 tensors, 28 B from step 1 to step 8"
    assert str(found).partition(". ")[0] == line
    peak, grew, wrote = done.stderr.splitlines()
    told = "At most 20.1 MiB on cpu, of it 20.0 MiB other tensors, made at train.py:16 in <module>."
    assert peak == told
    assert grew.startswith(f"{line}. ")
    assert wrote == "Wrote train.tenure. See it with: tenure report train.tenure"
    assert "cpu after " in str(_recorded())


def test_a_thread_that_outlives_the_code_of_the_program_is_recorded():
    end = "threading.Thread(target=lambda: (time.sleep(0.5), train())).start()"
    _run(TRAINING + end, "--leaks", "--timeline")
    found = _recorded()
    assert (found.ended, found.n_steps) == ("exit code 0", 8)
    # its variables are gone when Python calls exit handlers, and the looks have seen them
    assert found.growth[0].name.endswith("losses")
    assert found.timeline.duration_s > 0.5


@pytest.mark.slow
def test_lines_of_functions_of_the_program_and_of_modules_are_measured():
    Path("helper.py").write_text(
        "import torch\nfrom torch import ones\n"
        "def make():\n    return ones(256)\nimported = make()\n"
    )
    program = """
        import helper
        import torch
        class Trainer:
            def step(self):
                def inner():
                    return helper.make() * 2
                x = inner()
                return x
        Trainer().step()
        """
    named = ("Trainer.step", "helper:make", "inner", "nothing", "helper:ones")
    done = _run(program, *(word for name in named for word in ("--lines", name)))
    found = _recorded()
    by_function = {}
    for record in found.lines.records:
        by_function.setdefault(record.function, []).append((record.line, record.hits))
    assert by_function == {
        # from the end of the import of its module on
        "make": [(4, 1)],
        "Trainer.step": [(6, 1), (8, 1), (9, 1)],
        "Trainer.step.<locals>.inner": [(7, 1)],
    }
    told, refused = found.notes
    assert refused.startswith("--lines: ")
    assert "ones has no lines to profile" in refused
    assert told == "the program has no function nothing for --lines"
    assert max(map(len, str(found).splitlines())) <= 80
    # before the program runs, and once
    assert done.stderr.startswith(f"tenure run: {told}\n")
    assert done.stderr.count(told) == 1


@pytest.mark.slow
def test_a_budget_ends_the_program_and_the_file_is_written_with_what_filled_it():
    program = """
        import torch
        def fill():
            piles = []
            while True:
                piles.append(torch.ones(1 << 18))
        fill()
        """
    done = _run(program, "--budget", "8MiB", "--timeline", code=1)
    last, peak, wrote = done.stderr.splitlines()[-3:]
    assert peak.startswith("At most 9.0 MiB on cpu, of it ")
    assert "made at train.py:6 in fill" in peak
    assert last.startswith("torch.OutOfMemoryError: cpu out of memory. Tried to allocate 1.0 MiB")
    assert wrote == "Wrote train.tenure. See it with: tenure report train.tenure"
    assert "tenure" not in done.stderr.partition("torch.OutOfMemoryError")[0]
    found = _recorded()
    assert found.ended.startswith("torch.OutOfMemoryError: cpu out of memory")
    # the timeline counts what the operation had made that was refused
    assert found.peaks["cpu"] == 9 << 20
    assert sum(row.n_bytes for row in found.memory.rows if "piles" in row.name) == 8 << 20
    # no stack goes on below the program, to the command that runs it
    stacks = {row.stack for row in found.timeline.devices[0].at_peak}
    assert ("train.py:7 in <module>", "train.py:6 in fill") in stacks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_process_that_is_full_writes_its_file():
    program = """
        import resource, torch
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + (192 << 20), -1))
        piles = []
        for size in (22, 20, 16, 12, 10, 22):
            try:
                while True:
                    piles.append(torch.ones(1 << size))
            except (RuntimeError, MemoryError) as error:
                last = error
        raise last
        """
    done = _run(program, code=1)
    assert "Wrote train.tenure" in done.stderr
    found = _recorded()
    assert found.exit_code == 1
    assert found.ended.startswith("RuntimeError: [enforce fail at alloc_cpu.cpp")
    assert found.memory.total_bytes > 100 << 20
    assert "MemoryError" not in done.stderr


@pytest.mark.slow
def test_scopes_that_report_are_in_the_recording_the_first_hundred_whole():
    program = """
        import contextlib, torch
        from tenure import NewDisposeScope, ScopeLeakError
        kept = []
        for policy in ["raise", *["report"] * 101]:
            with contextlib.suppress(ScopeLeakError), NewDisposeScope(policy, policy=policy):
                kept.append(torch.ones(3))
        """
    _run(program, "-q", "--leaks")
    found = _recorded()
    assert [len(report) for report in found.leaks] == [1] * 100
    assert "'raise'" in str(found.leaks[0])
    assert "'report'" in str(found.leaks[1])
    assert found.notes == ("--leaks: 2 more scopes reported leaks, which are left out",)
    assert "kept" in str(found)


def test_each_run_writes_a_new_file_and_report_takes_the_newest(capsys):
    assert main(["report"]) == 2
    assert capsys.readouterr().err == (
        "tenure report: error: There is no *.tenure in this folder. Name a file, or record one "
        "with tenure run.\n"
    )
    for name in ("train.tenure", "train.2.tenure"):
        assert f"Wrote {name}. See it with: tenure report {name}\n" in _run("pass").stderr
    # of a program without torch
    assert main(["leaks", "train.tenure"]) == 0
    told = "No growth to judge: no optimizer made a step, and no model was called."
    assert capsys.readouterr().out.startswith(told)
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0
    _run("import sys; sys.exit(4)", "-q", code=4)
    os.utime("train.2.tenure", (1, 1))
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 4


def test_a_file_is_not_overwritten_before_the_program_runs(capsys):
    Path("train.py").write_text("open('ran', 'w')")
    Path("train.tenure").write_text("mine")
    named = ["-o", "train.tenure", "train.py"]
    assert main(["run", *named]) == 2
    assert capsys.readouterr() == (
        "",
        "tenure run: error: train.tenure is there already, and was left as it is. Overwrite it "
        "with -f, or name another file with -o.\n",
    )
    assert Path("train.tenure").read_text() == "mine"
    assert not os.path.exists("ran")
    assert main(["run", *named, "-f"]) == 2
    assert "Overwrite it with -f before the program: tenure run -f ..., " in capsys.readouterr().err
    _run("pass", "-f")
    assert _recorded().exit_code == 0


def test_a_file_that_came_meanwhile_stays():
    done = _run("open('train.tenure', 'w').write('mine')")
    assert done.stderr.startswith("Wrote train.2.tenure. ")
    assert Path("train.tenure").read_text() == "mine"
    assert Recording.load("train.2.tenure").exit_code == 0


def test_each_rank_has_a_file_of_its_own(capsys):
    for rank in ("0", "3"):
        _run("pass", "-o", "out.tenure", RANK=rank)
    assert sorted(os.listdir()) == ["out.rank0.tenure", "out.rank3.tenure", "train.py"]
    assert Recording.load("out.rank3.tenure").rank == 3
    assert main(["report", "--json", "out.rank3.tenure", "out.rank0.tenure"]) == 0
    ranks = json.loads(capsys.readouterr().out)["recordings"]
    assert [each["rank"] for each in ranks] == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "There is no program. Name a script, -m or -c. See tenure run --help."),
        (["-m"], "-m needs the name of a module. See tenure run --help."),
        (["-c"], "-c needs code. See tenure run --help."),
        (["-o", "folder/", "-c", "pass"], "folder is a folder. Name a file with -o."),
        (["-o", "no/x", "-c", "pass"], "There is no folder no. Make it, or name another."),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_nothing_runs(arguments, complaint, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    os.mkdir("folder")
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr() == ("", f"tenure run: error: {complaint}\n")


def test_options_after_a_program_are_the_programs_and_its_name_may_begin_with_a_dash():
    Path("-x.py").write_text("import sys; print(sys.argv)")
    words = ["-x.py", "-q", "--", "--leaks", "-m", "x"]
    done = run_python("-m", "tenure", "run", "-q", "--", *words)
    assert (done.stdout, done.stderr) == (f"{words}\n", "")


@pytest.mark.slow
def test_children_run_plainly_and_are_told():
    program = """
        import signal, torch
        from torch.utils.data import DataLoader
        class Rows(list):
            def __getitem__(self, index):
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                assert not torch.utils._python_dispatch._get_current_dispatch_mode()
                # more than the budget of the parent
                return torch.ones(1 << 22).sum()
        torch.ones(4)
        if __name__ == "__main__":
            for batch in DataLoader(Rows(range(8)), batch_size=2, num_workers=2):
                print(batch.sum().item())
        """
    done = _run(program, "--budget", "8MiB", "--leaks", "--lines", "work", "--timeline")
    assert done.stdout.split() == ["8388608.0"] * 4
    assert sorted(os.listdir()) == ["train.py", "train.tenure"]
    assert "2 child processes were not recorded" in _recorded().notes
    assert "2 child processes were not recorded" in done.stderr
    assert _recorded().peaks["cpu"] == 16


def test_a_signal_that_comes_while_the_file_is_written_waits():
    program = """
        import os, signal, time
        import tenure._cli._program._recorder as recorder
        write = recorder.write_facts
        def interrupted(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return write(*args, **kwargs)
        recorder.write_facts = interrupted
        os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)
        """
    done = _run(program, code=-15)
    assert _recorded().ended == "SIGTERM"
    assert sorted(os.listdir()) == ["train.py", "train.tenure"]
    assert done.stderr.count("\n") == 1


EPOCHS = """def main():
        predictions = []
        for epoch in range(4):
            train(10)
            predictions.append(model(torch.ones(200, 64)))
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("if __name__ == '__main__': sys.exit(main())", 0),
        ("    signal.raise_signal(signal.SIGINT)\n    main()", -signal.SIGINT),
    ],
    ids=["returns", "interrupted"],
)
def test_a_leak_of_one_tensor_an_epoch_is_named_after_four_epochs(call, code):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = _run(TRAINING + EPOCHS + call, code=code)
    signal.signal(signal.SIGINT, before)
    (found,) = _recorded().growth
    assert (found.name, found.n_tensors) == ("main.<locals>.predictions", 4)
    assert "main.<locals>.predictions grew by 4 tensors" in done.stderr
    assert "tenure" not in done.stderr.partition("main.<locals>")[0]


@pytest.mark.slow
def test_too_few_looks_claim_nothing():
    end = "kept = [torch.ones(3)]\n    train(2)\n    del model, optimizer"
    peak, judged, _ = _run(TRAINING + end).stderr.splitlines()
    assert re.fullmatch(
        r"At most [\d.]+ MiB of RAM; at the end 12 B of other tensors, such as kept\[0\]\.", peak
    )
    # the end right after a look is no other one
    told = "Too short to judge growth (2 steps). Run at least 8 steps."
    assert judged.startswith(told)
    assert told in str(_recorded().leaks_found())


@pytest.mark.slow
def test_by_default_no_operation_is_watched_and_an_error_that_ends_it_is_explained():
    program = """train()
    assert torch.overrides._get_current_function_mode() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    def fill():
        try:
            torch.empty(1 << 60, dtype=torch.uint8)
        except RuntimeError as error:
            print("it is full")
            raise error
    fill()
    """
    done = _run(TRAINING + program, code=1)
    found = _recorded()
    # the call, and not the line that raises its error again
    assert found.oom.site == "train.py:21 in fill"
    # below the traceback, where a reader begins
    assert f"\nOut of memory: {found.oom.first_line}\n" in done.stderr.rpartition("RuntimeError")[2]
    assert found.timeline is None


@pytest.mark.slow
def test_an_error_that_the_program_handled_is_named_with_the_option_that_explains_it():
    program = """
        import sys, torch
        from tenure.adaptive import memory_budget
        try:
            with memory_budget('1MiB'): torch.ones(1 << 20)
        except RuntimeError:
            sys.exit(3)
        """
    told = "--on-oom: the program has handled an out-of-memory error. Run it with --on-oom to see "
    done = _run(program, code=3)
    assert f"tenure run: {told}the cause." in done.stderr
    found = _recorded()
    assert found.oom is None
    assert f"{told}the cause." in found.notes
    done = _run(program, "--on-oom", "-f", code=3)
    assert told not in done.stderr
    assert _recorded().oom is not None


@pytest.mark.slow
def test_work_that_step_tries_again_is_no_error_that_the_program_handled():
    program = """
        import contextlib, sys, threading, torch
        from tenure.adaptive import memory_budget, reset, statistics, step
        from tenure.testing import simulated_accelerator
        def train(device="cpu"):
            reset()  # what fitted is remembered
            model = torch.nn.Linear(64, 64).to(device)
            batch = torch.ones(4096, 64, device=device)
            assert step(lambda x: model(x).square().mean(), batch).attempts > 1
        with simulated_accelerator(budget="4MiB", allocator="cuda") as sim:
            train(sim.device)
            thread = threading.Thread(target=train, args=(sim.device,))
            thread.start()
            thread.join()
            statistics().reset()
            if len(sys.argv) > 1:
                with contextlib.suppress(torch.OutOfMemoryError):
                    torch.empty(1 << 30, device=sim.device)
            with memory_budget("2MiB"):
                train()
            assert sim.n_ooms > 0
        """
    assert "--on-oom" not in _run(program).stderr
    assert "--on-oom" in _run(program, rest=["fails"]).stderr


def test_without_a_standard_error_nothing_is_said():
    assert _run("import sys; sys.stderr = None").stdout == ""


def test_a_program_with_a_module_that_tenure_has_imported_is_refused_before_it_runs():
    Path("json.py").write_text("mine = True")
    done = _run("open('ran', 'w')", code=2)
    assert done.stderr == (
        f"tenure run: error: {os.path.abspath('json.py')} has the name of a module of Python that "
        "tenure has imported, and the program would get that one. Rename the file.\n"
    )
    assert sorted(os.listdir()) == ["json.py", "train.py"]
