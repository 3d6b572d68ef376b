"""What the plugin does to tests, which one pytest in a process of its own runs for all stories."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.programs import IMPORTED, run_program, run_python

_HEAD = """import gc, pytest, torch, unittest
from tenure import NewDisposeScope, is_disposed

kept = []

def holds():
    kept.append(torch.ones(1000))

"""
_PROGRAM = """
import os, sys, pytest
os.chdir({folder!r})
# no summary: where CI is set it would say each failure whole once more
sys.exit(pytest.main([*{arguments!r}, "-v", "-p", "no:cacheprovider", "-rN"]))
"""


class Outcome:
    """How a run of tests ended, and what it printed of each."""

    def __init__(self, text):
        self.text = text
        self.failed = re.findall(r"^\S+::(\w+) FAILED", text, re.MULTILINE)
        self.others = re.findall(r"^\S+::(\w+) (?:PASSED|SKIPPED)", text, re.MULTILINE)
        # the whole name of each, and what is below it up to the next
        found = re.split(r"^_{3,} ([\w. ]+) _{3,}$", text, flags=re.MULTILINE)
        self.of = dict(zip(found[1::2], found[2::2], strict=True))


def says(text, *patterns):
    """Whether a text has lines of these patterns, in this order."""
    lines = iter(text.splitlines())
    missing = [p for p in patterns if not any(fnmatch(line, p) for line in lines)]
    assert not missing, text
    return True


def _run(folder, sources, *arguments):
    """Run files of tests in a process of its own, without what this repository configures."""
    for name, source in sources.items():
        Path(folder, f"test_{name}.py").write_text(_HEAD + source)
    Path(folder, "pytest.ini").write_text("[pytest]\n")
    program = _PROGRAM.format(folder=str(folder), arguments=arguments)
    done = run_program(program, imported=IMPORTED, hides=True)
    return Outcome(f"{done.stderr}{done.stdout}")


LIMITS = """before = torch.ones(1 << 20)

@pytest.mark.limit_tensor_memory("100 KiB")
def test_within():
    torch.ones(1024)
    before.sum()

@pytest.mark.limit_tensor_memory("1 MiB")
def test_just_above():
    torch.ones((1 << 18) + 2)

@pytest.mark.limit_tensor_memory("100 KiB")
def test_temporaries():
    x = torch.ones(128, 128)
    for _ in range(3):
        x = x * 2
    del x

@pytest.mark.limit_tensor_memory("2 MiB")
def test_lines():
    held = []
    for _ in range(3):
        held.append(torch.ones(1 << 18))
    held.append(held[0] * 2)

old = [torch.ones(1 << 20)]
leaf = torch.ones(1 << 18, requires_grad=True)
leaf.grad = torch.zeros(1 << 18)

@pytest.mark.limit_tensor_memory("2 MiB")
def test_adds_to_a_gradient():
    (leaf * 2).sum().backward()

@pytest.mark.limit_tensor_memory("1 MiB")
def test_frees_what_was_before():
    torch.ones(1 << 17)
    old.clear()
    torch.ones(1 << 19)
"""
_MARKERS = "()", "('many')", "('1 MB', '2 MB')"
MARKERS = "\n".join(
    f"@pytest.mark.limit_tensor_memory{marker}\ndef test_marker_{n}(): pass\n"
    for n, marker in enumerate(_MARKERS)
)
LEAKS = """net = torch.nn.Linear(4, 4)
adam = torch.optim.Adam(net.parameters())

@pytest.mark.no_tensor_leaks
def test_leaks():
    holds()

@pytest.mark.no_tensor_leaks
def test_step():
    net(torch.ones(2, 4)).sum().backward()
    adam.step()

@pytest.mark.no_tensor_leaks
@pytest.mark.limit_tensor_memory("1 B")
def test_fails():
    holds()
    assert 1 == 2

def test_in_a_scope(tensor_scope):
    holds()
    assert len(tensor_scope) == 1

def test_logs(caplog):
    assert is_disposed(kept[-1])
    with NewDisposeScope("step", policy="report"):
        holds()
    assert "<DisposeScope 'step'>: 1 tensor leaked" in caplog.text

@pytest.mark.no_tensor_leaks
class TestOwn:
    def test_of_self(self):
        self.x = torch.ones(10)

    def test_of_all(self):
        type(self).x = torch.ones(10)

    def test_both(self):
        self.x = torch.ones(10)
        kept.append(self.x)

@pytest.mark.no_tensor_leaks
class TestCase(unittest.TestCase):
    def setUp(self):
        self.batches = [torch.ones(4)]

    def test_own(self):
        self.loss = (self.batches[0] * 2).sum()

@pytest.mark.no_tensor_leaks
class TestCoroutines(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.batches = [torch.ones(4)]

    async def test_a_leak(self):
        holds()

    async def test_own(self):
        self.loss = (self.batches[0] * 2).sum()

    @pytest.mark.limit_tensor_memory("1 KiB")
    async def test_large(self):
        torch.ones(1000)

    async def test_skips(self):
        self.skipTest("later")

    async def test_own_error(self):
        holds()
        self.fail("its own error")
"""
_LOOPS = {
    "range(3)": "ValueError: 3 steps with a warm-up of 2 leave 1",
    "iter(range(9)), steps=12": "ValueError: the items ended after 9 steps of 12",
    "iter(range(9))": "TypeError: tensor_growth() got a range_iterator, which does not say*",
    "range(9), limit='much'": "*ByteSizeError*",
}
GROWTH = """def test_fails_with_a_tensor():
    x = torch.ones(1 << 20)
    assert x is None

def test_grows(tensor_growth):
    for i in tensor_growth(range(6)):
        if i == 4: gc.collect()
        holds()
        replaced = torch.ones(77)

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

def test_breaks(tensor_growth):
    for i in tensor_growth(range(10)):
        holds()
        if i == 3:
            break

def test_stops(tensor_growth):
    for i in tensor_growth(range(10)):
        assert i < 5

""" + "\n".join(
    f"def test_loop_{n}(tensor_growth):\n    for _ in tensor_growth({call}): pass\n"
    for n, call in enumerate(_LOOPS)
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    sources = {"limits": LIMITS, "markers": MARKERS, "leaks": LEAKS, "growth": GROWTH}
    folder = tmp_path_factory.mktemp("stories")
    return _run(folder, sources, "-W", "error::tenure.ScopeUsageWarning")


def test_a_test_fails_that_leaks_grows_or_takes_too_much_and_no_other(stories):
    assert stories.failed == [
        "test_fails_with_a_tensor",
        "test_grows", "test_stops", *(f"test_loop_{n}" for n in range(4)),
        "test_leaks", "test_fails", "test_of_all", "test_both",
        "test_a_leak", "test_large", "test_own_error",
        "test_just_above", "test_temporaries", "test_lines", "test_frees_what_was_before",
        *(f"test_marker_{n}" for n in range(3)),
    ]  # fmt: skip
    assert len(stories.others) == 13


def test_a_test_above_its_limit_fails_with_the_lines_of_its_own(stories):
    above = "*test took 1,048,584 B on cpu, and 1,048,576 B is its limit; at the peak:*"
    assert says(stories.of["test_just_above"], above)
    # two of 64 KiB at once are more than the limit
    twice = "*the tensors of the test took 128.0 KiB on cpu, and 100.0 KiB is its limit*"
    assert says(stories.of["test_temporaries"], twice)
    assert says(
        stories.of["test_lines"],
        "*3.0 MiB  other tensors, made at test_limits.py:31 in test_lines*",
        "*1.0 MiB  other tensors, made at test_limits.py:32 in test_lines*",
    )
    freed = "*the tensors of the test took 2.0 MiB on cpu, and 1.0 MiB is its limit*"
    assert says(stories.of["test_frees_what_was_before"], freed)
    assert "before the recording" not in stories.text


def test_a_limit_that_is_none_fails_the_test_by_name(stories):
    for n, marker in enumerate(_MARKERS):
        told = stories.of[f"test_marker_{n}"]
        assert says(told, f"*@pytest.mark.limit_tensor_memory{marker}*")
        assert told.count("@pytest.mark.limit") <= 3
        assert "During handling" not in told


def test_a_leak_is_named_and_what_is_gone_or_of_a_library_or_of_self_is_none(stories):
    named = "*<DisposeScope 'test_leaks'>: 1 tensor leaked*"
    assert says(stories.of["test_leaks"], named, "*held by *kept*")
    assert {"TestOwn.test_of_all", "TestOwn.test_both"} <= stories.of.keys()
    # a test that fails does so by its own error alone
    assert says(stories.of["test_fails"], "*assert 1 == 2*")
    assert "<DisposeScope 'test_fails'>" not in stories.text
    assert "is its limit" not in stories.of["test_fails"]


def test_coroutines_that_unittest_runs_are_checked_as_functions_are(stories):
    said = {
        "test_own_error": "*its own error*",
        "test_large": "*the tensors of the test took 3.9 KiB on cpu, and 1.0 KiB is its limit*",
        "test_a_leak": "*<DisposeScope 'test_a_leak'>: 1 tensor leaked*",
    }
    assert all(says(stories.of[f"TestCoroutines.{name}"], told) for name, told in said.items())


def test_a_loop_that_grows_fails_and_one_that_is_left_or_is_none_is_an_error(stories):
    left = "*the loop was left after 4 of 10 steps, so growth was not looked for. *"
    assert says(stories.of["ERROR at teardown of test_breaks"], left)
    assert stories.text.count("ERROR at teardown") == 1
    assert says(
        stories.of["test_grows"],
        "*each step left 3.9 KiB or more behind*",
        "- *kept grew by 4 tensors, 15.6 KiB from step 2 to step 6. Bound it, *",
        "+15.6 KiB: 4 new and 0 freed storages*",
        "held by *change*",
        "*kept?2?  *new *",
    )
    for n, told in enumerate(_LOOPS.values()):
        assert says(stories.of[f"test_loop_{n}"], f"*{told}*")


LARGE = """def test_small():
    torch.ones(256)
    assert 1 == 2

def test_large():
    torch.ones(256, 256)

def test_none():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_the_option_lists_the_tests_that_took_the_most(tmp_path, workers):
    told = _run(tmp_path, {"it": LARGE}, "--tenure", *workers).text
    assert "1 failed, 2 passed" in told
    assert says(
        told,
        "*most memory of tensors at once*",
        "*256.0 KiB  *::test_large",
        "*made at *",
        "*1.0 KiB  *::test_small",
    )


@pytest.mark.slow
def test_pytest_finds_the_plugin_by_itself_and_a_run_that_asks_for_nothing_imports_no_torch(
    tmp_path,
):
    Path(tmp_path, "test_it.py").write_text(
        """
import sys

def test(pytestconfig):
    assert any("limit_tensor_memory(size)" in line for line in pytestconfig.getini("markers"))
    assert "torch" not in sys.modules
    assert "tenure.scopes" not in sys.modules
"""
    )
    done = run_python("-m", "pytest", "-q", "-c", os.devnull, str(tmp_path))
    assert done.returncode == 0, done.stdout
