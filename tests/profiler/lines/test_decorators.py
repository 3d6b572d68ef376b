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


def test_profile_prints_when_the_program_ends(tmp_path):
    text = """
    @profile
    def work(n):
        return torch.ones(n)

    work(10)
    work(20)
    print("the end")
    """
    assert program(text, tmp_path) == (
        "the end\n"
        "## work, script.py:7, cpu\n"
        "line  hits  alloc  freed    net  peak  code\n"
        "   7                                   @profile\n"
        "   8                                   def work(n):\n"
        "   9     2  120 B    0 B  120 B  80 B      return torch.ones(n)\n"
    )


def test_profile_takes_columns_and_returns_the_function_itself(tmp_path):
    text = """
    def work(n):
        return torch.ones(n)

    assert profile(work) is work
    profile(columns=("hits",))(work)
    work(10)
    """
    printed = program(text, tmp_path).split("##")
    assert printed[2].splitlines()[1] == "line  hits  code"
    assert printed[1].splitlines()[1] == "line  hits  alloc  freed   net  peak  code"


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


ON_A_DEVICE = """
from tenure.testing import simulated_accelerator
from torch import nn

def layer(device):
    return nn.Linear(128, 128, device=device)

sim = simulated_accelerator()
sim.__enter__()
set_target_gpu(0)
"""


def test_the_decorator_on_a_method_prints_every_so_many_calls(tmp_path):
    """As in the README of pytorch_memlab, and so the next one."""
    text = f"""{ON_A_DEVICE}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = layer("sim")

    @profile_every(2, columns=("hits",))
    def forward(self, x):
        return self.inside(x)

net = Net()
for n in range(3):
    print(n)
    net(torch.ones(1, 128, device="sim"))
"""
    assert program(text, tmp_path) == (
        "0\n1\n"
        "## Net.forward, script.py:22, sim:0\n"
        "line  hits  code\n"
        '  22        @profile_every(2, columns=("hits",))\n'
        "  23        def forward(self, x):\n"
        "  24     2      return self.inside(x)\n"
        "2\n"
    )


def test_the_target_can_be_switched_inside_a_profiled_function(tmp_path):
    text = f"""{ON_A_DEVICE}
@profile_every(columns=("net",))
def work():
    first = layer("sim")
    set_target_device("cpu")
    second = layer("cpu")
    set_target_gpu(0)
    third = layer("sim")
    return first, second, third

kept = work()
"""
    # 128 * 128 and 128 numbers, in whole 512 B
    on_cpu, on_sim = program(text, tmp_path).split("\n\n")
    assert on_cpu.splitlines()[0] == "## work, script.py:17, cpu"
    assert [line.partition("=")[0].split() for line in on_cpu.splitlines()[5:]] == [
        ["20", 'set_target_device("cpu")'],
        ["21", "64.5", "KiB", "second"],
        ["22", "0", "B", "set_target_gpu(0)"],
        ["23", "third"],
        ["24", "return", "first,", "second,", "third"],
    ]
    assert on_sim.splitlines()[0] == "## work, script.py:17, sim:0"
    assert [line.partition("=")[0].split() for line in on_sim.splitlines()[4:]] == [
        ["19", "64.5", "KiB", "first"],
        ["20", "0", "B", 'set_target_device("cpu")'],
        ["21", "second"],
        ["22", "set_target_gpu(0)"],
        ["23", "64.5", "KiB", "third"],
        ["24", "0", "B", "return", "first,", "second,", "third"],
    ]


def test_profile_every_keeps_what_a_function_is(tmp_path):
    text = """
    class Model:
        @staticmethod
        @profile_every()
        def static(n):
            return n

        @classmethod
        @profile_every()
        def of_class(cls, n):
            return cls, n

        @property
        @profile_every()
        def size(self):
            "How many."
            return self.n

    @profile_every()
    def later(n):
        return n

    assert later.__name__ == "later"
    model = Model()
    model.n = 5
    model.of_class = profile_every()(model.of_class)
    print(f"= {model.size} {Model.size.__doc__}")
    print("=", Model.static(1), Model().static(1), model.of_class(2)[1], later(3))
    """
    printed = program(text, tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("=")] == [
        "= 5 How many.",
        "= 1 1 2 3",
    ]
    assert printed.count("## ") == 6
    assert "No lines" not in printed


async def later():
    pass


async def stream():
    yield 1


def several():
    yield 1


@pytest.mark.parametrize(
    "handed",
    [later, stream, several, staticmethod(program), property(program), torch.nn.Linear(2, 2), len],
)
def test_what_is_no_plain_function_is_refused(handed):
    message = (
        r"^profile_every\(\) counts the calls of plain functions and methods, and .* is none. "
        r"Decorate the function inside a staticmethod, a property or a module, or use profile\(\), "
        r"which takes generators and coroutines too and prints when the program ends.$"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        profile_every()(handed)


def test_profile_takes_coroutines_and_generators():
    profiler = LineProfiler(later, stream, several, device="cpu")
    assert profiler.functions == ("later", "stream", "several")


def test_profile_every_can_be_turned_off():
    def work():
        pass

    assert profile_every(3, enable=False)(work) is work


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, len])
def test_an_interval_that_is_none_is_refused(interval):
    message = (
        r"^profile_every\(\) wants a number of calls, at least 1, after which to print. Use it"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        profile_every(interval)


def test_what_has_no_lines_cannot_be_decorated():
    with pytest.raises(ProfilerUsageError, match=r"^len has no lines to profile"):
        profile(len)


@pytest.mark.parametrize("decorate", [profile, profile_every])
@pytest.mark.parametrize("columns", ["hit", ("hits", "peaks"), (3,)])
def test_columns_that_do_not_exist_are_refused_before_anything_runs(decorate, columns):
    with pytest.raises(ProfilerUsageError, match=r"^There is no column "):
        decorate(columns=columns)


def test_a_table_that_cannot_be_printed_does_not_stop_those_after_it(tmp_path):
    text = """
    @profile
    def work(n):
        return torch.ones(n)

    @profile(columns=("hits",))
    def other():
        pass

    other()
    display = LineProfiler.display
    def broken(self, func, columns):
        if func is work:
            raise ProfilerUsageError("no such field")
        return display(self, func, columns)
    LineProfiler.display = broken
    """
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(text))
    done = run_program(path, COLUMNS="300")
    assert done.stdout.splitlines()[0] == f"## other, {path}:11, cpu"
    assert "tenure.profiler.ProfilerUsageError: no such field" in done.stderr


def test_clearing_forgets_what_was_collected_and_nothing_else(tmp_path):
    text = """
    @profile
    def work(n):
        return torch.ones(n)

    @profile
    def other():
        pass

    work(10)
    other()
    clear_global_line_profiler()
    work(20)
    """
    *table, note = program(text, tmp_path).splitlines()
    assert table[-1].split()[:4] == ["9", "1", "80", "B"]
    assert note.startswith("No lines: other did not run while the profiler was enabled.")


def test_another_profiler_that_ends_leaves_the_decorators_alone(tmp_path):
    text = """
    @profile
    def work(n):
        return torch.ones(n)

    with LineProfiler(work, device="cpu"):
        work(1)
    work(2)
    """
    assert program(text, tmp_path).splitlines()[-1].split()[:4] == ["9", "2", "12", "B"]


def test_a_gpu_that_no_machine_without_gpus_has_is_the_cpu_with_a_warning(tmp_path):
    text = """
    import warnings

    @profile
    def work(n):
        x = torch.ones(n)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_target_gpu(1)
        print(caught[0].category.__name__, caught[0].filename == __file__)
        print(caught[0].message)
        return x * 2

    if torch.accelerator.is_available():
        print("ProfilerUsageWarning True\\nThere is no GPU 1 here")
    else:
        work(10)
    """
    lines = program(text, tmp_path).splitlines()
    assert lines[0] == "ProfilerUsageWarning True"
    assert lines[1].startswith("There is no GPU 1 here")
