"""What the plugin does to tests: each of these runs a pytest of its own."""

import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.adaptive.ranks.launch import IMPORTED
from tests.programs import run_program

_LEAKS = """import pytest
import torch

kept = []

def holds():
    kept.append(torch.ones(1000))
"""
_HEAD = "import pytest, torch\n"


_PROGRAM = """
import os, sys, pytest
os.chdir({folder!r})
# no summary: where CI is set it would say each failure whole once more
sys.exit(pytest.main([*{arguments!r}, "-p", "no:cacheprovider", "-rN"]))
"""


class Outcome:
    """How a run of tests ended."""

    def __init__(self, text):
        self.text = text
        last = text.strip().splitlines()[-1]
        self.counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", last)}

    def says(self, *patterns):
        """Whether there are lines of these patterns, in this order."""
        lines = iter(self.text.splitlines())
        missing = [p for p in patterns if not any(fnmatch(line, p) for line in lines)]
        assert not missing, self.text
        return True


@pytest.fixture
def run(tmp_path):
    """Run a file of tests in a process of its own, without what this repository configures."""

    def run(source, *arguments):
        Path(tmp_path, "test_it.py").write_text(source)
        Path(tmp_path, "pytest.ini").write_text("[pytest]\n")
        program = _PROGRAM.format(folder=str(tmp_path), arguments=arguments)
        done = run_program(program, imported=IMPORTED)
        return Outcome(f"{done.stderr}{done.stdout}")

    return run


def test_a_test_within_its_limit_passes_and_one_above_fails_with_the_line(run):
    result = run(
        _HEAD
        + """
@pytest.mark.limit_tensor_memory("100 KiB")
def test_small():
    torch.ones(1024)

@pytest.mark.limit_tensor_memory("100 KiB")
def test_large():
    held = torch.ones(256, 256)
"""
    )
    assert result.counts == {"passed": 1, "failed": 1}
    assert result.says(
        "*the tensors of the test took 256.0 KiB on cpu, and 100.0 KiB is its limit*",
        "*256.0 KiB*made at test_it.py:9 in test_large*",
    )


def test_a_limit_that_is_missed_by_a_few_bytes_is_told_in_bytes(run):
    result = run(
        _HEAD
        + """
@pytest.mark.limit_tensor_memory("1 MiB")
def test_just_above():
    torch.ones((1 << 18) + 2)
"""
    )
    assert result.says("*test took 1,048,584 B on cpu, and 1,048,576 B is its limit; at the peak:*")


@pytest.mark.slow
def test_temporaries_inside_operations_count_and_what_was_there_before_does_not(run):
    result = run(
        _HEAD
        + """
before = torch.ones(1 << 20)

@pytest.mark.limit_tensor_memory("100 KiB")
def test_before():
    before.sum()

@pytest.mark.limit_tensor_memory("100 KiB")
def test_peak():
    x = torch.ones(128, 128)
    for _ in range(3):
        x = x * 2
    del x
"""
    )
    # two of 64 KiB at once are more than the limit
    assert result.counts == {"passed": 1, "failed": 1}


@pytest.mark.slow
def test_only_what_the_test_made_is_told_and_the_same_line_once(run):
    result = run(
        _HEAD
        + """
before = torch.ones(1 << 22)

@pytest.mark.limit_tensor_memory("2 MiB")
def test_it():
    held = [
        torch.ones(1 << 18) for _ in range(3)]
    held += [each * 2 for each in held[:1]]
""",
        "--tenure",
    )
    assert result.counts == {"failed": 1}
    rows = re.findall(r"([\d.]+ MiB)  other tensors, made at (\S+)", result.text)
    assert rows == [("3.0 MiB", "test_it.py:8"), ("1.0 MiB", "test_it.py:9")]
    assert "before the recording" not in result.text


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["()", '("many")', '("1 MB", "2 MB")', "(bytes=1)"])
def test_a_limit_that_is_none_fails_the_test_by_name(run, marker):
    result = run(_HEAD + f"@pytest.mark.limit_tensor_memory{marker}\ndef test(): pass\n")
    assert result.counts == {"failed": 1}
    assert result.says(f"*@pytest.mark.limit_tensor_memory{marker}*".replace('"', "'"))
    assert "During handling" not in result.text
    assert result.text.count("@pytest.mark.limit") <= 3


@pytest.mark.slow
def test_a_leak_is_named_and_a_value_that_is_gone_is_none(run):
    result = run(
        _LEAKS
        + """
@pytest.mark.no_tensor_leaks
def test_leaks():
    holds()

@pytest.mark.no_tensor_leaks
def test_keeps_nothing():
    x = torch.ones(10)
    (x * 2).sum()
"""
    )
    assert result.counts == {"passed": 1, "failed": 1}
    assert result.says("*1 tensor leaked*", "*held by *kept*")
    assert result.text.count("1 tensor leaked") == 1
    assert "test_leaks" in next(line for line in result.text.splitlines() if "leaked" in line)


@pytest.mark.slow
def test_what_self_keeps_is_gone_with_the_test_and_what_its_class_keeps_is_not(run):
    result = run(
        _LEAKS
        + """
import unittest

@pytest.mark.no_tensor_leaks
class TestCase(unittest.TestCase):
    def setUp(self):
        self.batches = [torch.ones(4)]

    def test_own(self):
        self.loss = (self.batches[0] * 2).sum()

@pytest.mark.no_tensor_leaks
class TestOwn:
    def test_own(self):
        self.x = torch.ones(10)

    def test_of_all(self):
        type(self).x = torch.ones(10)

    def test_both(self):
        self.x = torch.ones(10)
        kept.append(self.x)
"""
    )
    assert result.counts == {"passed": 2, "failed": 2}
    assert result.says("*TestOwn.test_of_all*", "*TestOwn.test_both*")


@pytest.mark.slow
def test_coroutines_that_unittest_runs_are_checked_as_functions_are(run):
    result = run(
        _LEAKS
        + """
import unittest

@pytest.mark.no_tensor_leaks
class TestCase(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.batches = [torch.ones(4)]

    async def test_leaks(self):
        holds()

    async def test_own(self):
        self.loss = (self.batches[0] * 2).sum()

    @pytest.mark.limit_tensor_memory("1 KiB")
    async def test_large(self):
        torch.ones(1000)

    async def test_skips(self):
        self.skipTest("later")

    async def test_fails(self):
        holds()
        self.fail("its own error")
"""
    )
    assert result.counts == {"passed": 1, "failed": 3}
    assert result.says(
        "*its own error*",
        "*the tensors of the test took 3.9 KiB on cpu, and 1.0 KiB is its limit*",
        "*<DisposeScope 'test_leaks'>: 1 tensor leaked*",
    )


@pytest.mark.slow
def test_coroutines_on_another_thread_and_second_runs_of_one_are_left_alone(run, tmp_path):
    """Django's tests run them by asgiref, on a thread of its own."""
    tmp_path.joinpath("conftest.py").write_text(
        """
import asyncio, threading, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    def run():
        asyncio.run(pyfuncitem.obj())
    for _ in range(2):
        if "thread" in pyfuncitem.name:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
    return True
"""
    )
    result = run(
        _LEAKS
        + """
@pytest.mark.no_tensor_leaks
@pytest.mark.limit_tensor_memory("1 KiB")
async def test_on_a_thread():
    holds()

@pytest.mark.no_tensor_leaks
async def test_twice():
    torch.ones(4)

@pytest.mark.no_tensor_leaks
async def test_twice_leaks():
    holds()
"""
    )
    assert result.counts == {"passed": 2, "failed": 1}
    assert result.says("*<DisposeScope 'test_twice_leaks'>: 1 tensor leaked*")


@pytest.mark.slow
def test_training_leaks_nothing_by_its_gradients_and_its_optimizer(run):
    result = run(
        _HEAD
        + """
net = torch.nn.Linear(4, 4)
adam = torch.optim.Adam(net.parameters())

@pytest.mark.no_tensor_leaks
def test_step():
    net(torch.ones(2, 4)).sum().backward()
    adam.step()
"""
    )
    assert result.counts == {"passed": 1}


@pytest.mark.slow
def test_a_failing_test_fails_by_its_own_error_alone(run):
    result = run(
        _LEAKS
        + """
@pytest.mark.limit_tensor_memory("1 B")
@pytest.mark.no_tensor_leaks
def test_fails():
    holds()
    assert 1 == 2
"""
    )
    assert result.counts == {"failed": 1}
    text = result.text
    assert "assert 1 == 2" in text
    assert "is its limit" not in text


@pytest.mark.slow
def test_the_scope_of_a_test_lets_go_at_its_end(run):
    result = run(
        _LEAKS
        + """
from tenure import is_disposed

def test_first(tensor_scope):
    holds()
    assert len(tensor_scope) == 1

def test_second():
    assert is_disposed(kept[0])
""",
        "-W",
        "error::tenure.ScopeUsageWarning",
    )
    assert result.counts == {"passed": 2}


@pytest.mark.slow
def test_a_loop_that_grows_fails_and_names_who_holds_it(run):
    result = run(
        _LEAKS
        + """
def test_grows(tensor_growth):
    for _ in tensor_growth(range(6)):
        holds()

def test_fills_a_cache(tensor_growth):
    for i in tensor_growth(range(6)):
        if i == 3:
            holds()

def test_up_to_a_limit(tensor_growth):
    for _ in tensor_growth(range(6), limit="4 KB"):
        holds()

def test_of_an_endless_loader(tensor_growth):
    from itertools import count
    for _ in tensor_growth(count(), steps=6):
        torch.ones(5)
"""
    )
    assert result.counts == {"passed": 3, "failed": 1}
    assert result.says(
        "*each step left 3.9 KiB or more behind*",
        "- *kept grew by 4 tensors, 15.6 KiB from step 2 to step 6. Bound it, *",
        "+15.6 KiB: 4 new and 0 freed storages*",
        "held by *change*",
        "*kept?2?  *new *",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("range(3)", "ValueError: 3 steps with a warm-up of 2 leave 1"),
        ("iter(range(9)), steps=12", "ValueError: the items ended after 9 steps of 12"),
        (
            "iter(range(9))",
            "TypeError: tensor_growth() got a range_iterator, which does not say how many*",
        ),
        ("range(9), limit='much'", "*ByteSizeError*"),
        ("range(9), warmup=-1", "ValueError: warmup is -1, and no number of steps*"),
    ],
)
def test_growth_that_can_not_be_looked_for_is_an_error(run, call, told):
    result = run(f"def test(tensor_growth):\n    for _ in tensor_growth({call}): pass\n")
    assert result.counts == {"failed": 1}
    assert result.says(f"*{told}*")


@pytest.mark.slow
def test_a_loop_that_is_left_is_an_error_unless_the_test_has_failed(run):
    result = run(
        _LEAKS
        + """
def test_breaks(tensor_growth):
    for i in tensor_growth(range(10)):
        holds()
        if i == 3:
            break

def test_catches(tensor_growth):
    try:
        for i in tensor_growth(range(10)):
            assert i < 5
    except AssertionError:
        pass

def test_fails(tensor_growth):
    for i in tensor_growth(range(10)):
        assert i < 5
"""
    )
    assert result.says(
        "the loop was left after 4 of 10 steps, so growth was not looked for. *",
        "the loop was left after 6 of 10 steps, so growth was not looked for. *",
    )
    assert result.text.count("ERROR at teardown") == 2


@pytest.mark.slow
def test_the_option_lists_a_test_that_fails_by_itself(run):
    result = run(_HEAD + "def test_it():\n    torch.ones(256)\n    assert 1 == 2\n", "--tenure")
    assert result.says("*most memory of tensors at once*", "*1.0 KiB  *::test_it")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_the_option_lists_the_tests_that_took_the_most(run, workers):
    result = run(
        _HEAD
        + """
def test_small():
    torch.ones(256)

def test_large():
    torch.ones(256, 256)

def test_none():
    pass
""",
        "--tenure",
        *workers,
    )
    assert result.counts == {"passed": 3}
    assert result.says(
        "*most memory of tensors at once*",
        "*256.0 KiB  *::test_large",
        "*made at *",
        "*1.0 KiB  *::test_small",
    )


@pytest.mark.slow
def test_a_run_that_asks_for_nothing_imports_no_torch(tmp_path):
    Path(tmp_path, "test_it.py").write_text(
        """
import sys

def test():
    assert "torch" not in sys.modules
    assert "tenure.scopes" not in sys.modules
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_pytest_finds_the_plugin_by_itself():
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--markers", "-p", "no:cacheprovider"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "@pytest.mark.limit_tensor_memory(size)" in listed.stdout
    assert "@pytest.mark.no_tensor_leaks" in listed.stdout


@pytest.mark.slow
def test_leaks_of_scopes_are_logged_again_after_a_test_that_asked_for_none(run):
    result = run(
        _LEAKS
        + """
from tenure import NewDisposeScope

@pytest.mark.no_tensor_leaks
def test_leaks():
    holds()

def test_logs(caplog):
    with NewDisposeScope("step", policy="report"):
        holds()
    assert "<DisposeScope 'step'>: 1 tensor leaked" in caplog.text
"""
    )
    assert result.counts == {"passed": 1, "failed": 1}
    assert result.text.count("1 tensor leaked") == 1
