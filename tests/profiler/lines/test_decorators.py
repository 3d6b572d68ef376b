"""The decorators: in programs of their own, because they profile until the program ends."""

import textwrap

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError, profile, profile_every

from ...programs import run_program

HEAD = """
import torch
from tenure.profiler import *
from tenure.profiler import profile, profile_every
set_target_device("cpu")
"""


def program(text, tmp_path):
    """What a program prints; it must not fail, nor write anything to stderr."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(text))
    done = run_program(path, COLUMNS="300")
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.replace(f"{tmp_path}/", "")


def test_profile_prints_when_the_program_ends_what_came_after_the_last_clearing(tmp_path):
    text = """
    @profile
    def work(n):
        return torch.ones(n)

    @profile
    def other():
        pass

    @profile
    def never():
        pass

    def plain():
        pass

    assert profile(plain) is plain
    profile(columns=("hits",))(work)
    work(1)
    other()
    clear_global_line_profiler()
    with LineProfiler(work, device="cpu"):
        work(10)
    work(20)
    print("the end")
    """
    printed = program(text, tmp_path)
    assert printed.startswith(
        "the end\n"
        "## work, script.py:7, cpu\n"
        "line  hits  alloc  freed    net  peak  code\n"
        "   7                                   @profile\n"
        "   8                                   def work(n):\n"
        "   9     2  120 B    0 B  120 B  80 B      return torch.ones(n)\n"
        "## work, script.py:7, cpu\n"
        "line  hits  code\n"
        "   7        @profile\n"
        "   8        def work(n):\n"
        "   9     2      return torch.ones(n)\n"
        "No lines: other, never, plain did not run while the profiler was enabled."
    )
    assert printed.count("No lines") == 1


def test_profile_prints_after_an_interrupt(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        HEAD
        + "@profile\ndef work(n):\n    x = torch.ones(n)\n    raise KeyboardInterrupt\nwork(10)"
    )
    done = run_program(path)
    assert "     1   40 B    0 B  40 B  40 B      x = torch.ones(n)" in done.stdout
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_profile_every_prints_after_every_so_many_calls(tmp_path):
    text = """
    @profile_every(3, columns=("hits",))
    def third(n):
        return torch.ones(n)

    @profile_every(columns=("hits", "alloc"))
    def each(n):
        return torch.ones(n)

    for n in range(4):
        third(n)
    each(5)
    """
    blocks = program(text, tmp_path).split("## ")[1:]
    assert [block.splitlines()[0] for block in blocks] == [
        "third, script.py:7, cpu",
        "each, script.py:11, cpu",
    ]
    assert blocks[0].splitlines()[-1] == "   9     3      return torch.ones(n)"
    assert blocks[1].splitlines()[-1] == "  13     1   20 B      return torch.ones(n)"


def test_the_target_is_an_accelerator_by_its_index(tmp_path):
    text = """
    from tenure.testing import simulated_accelerator

    @profile_every(columns=("net",))
    def work():
        return torch.ones(128, device="sim")

    with simulated_accelerator():
        set_target_gpu(0)
        kept = work()
    """
    lines = program(text, tmp_path).splitlines()
    assert lines[0] == "## work, script.py:9, sim:0"
    assert lines[-1].split()[:3] == ["11", "512", "B"]


def test_profile_every_keeps_what_a_function_is(tmp_path):
    text = """
    class Model:
        @classmethod
        @profile_every()
        def of_class(cls, n):
            return cls, n

        @property
        @profile_every()
        def size(self):
            "How many."
            return 5

    model = Model()
    model.of_class = profile_every()(model.of_class)
    assert model.of_class.__name__ == "of_class"
    print(f"= {model.size} {Model.size.__doc__} {model.of_class(2)[1]}")
    """
    printed = program(text, tmp_path)
    assert "= 5 How many. 2\n" in printed
    assert printed.count("## ") == 3
    assert "No lines" not in printed


async def later():
    pass


def several():
    yield 1


@pytest.mark.parametrize("handed", [later, several, staticmethod(program), torch.nn.Linear(2, 2)])
def test_what_is_no_plain_function_is_refused(handed):
    message = (
        r"^profile_every\(\) counts the calls of plain functions and methods, and .* is none. "
        r"Decorate the function inside a staticmethod, a property or a module, or use profile\(\), "
        r"which takes generators and coroutines too and prints when the program ends.$"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        profile_every()(handed)


@pytest.mark.parametrize("interval", [0, len])
def test_an_interval_that_is_none_is_refused(interval):
    message = (
        r"^profile_every\(\) wants a number of calls, at least 1, after which to print. Use it"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        profile_every(interval)


@pytest.mark.parametrize("decorate", [profile, profile_every])
def test_columns_that_do_not_exist_are_refused_before_anything_runs(decorate):
    with pytest.raises(ProfilerUsageError, match=r"^There is no column "):
        decorate(columns=("hits", "peaks"))
    with pytest.raises(ProfilerUsageError, match=r"^len (has no lines|counts)|^profile_every\(\) "):
        (decorate if decorate is profile else decorate())(len)
    assert profile_every(3, enable=False)(program) is program
    assert LineProfiler(later, several, device="cpu").functions == ("later", "several")
