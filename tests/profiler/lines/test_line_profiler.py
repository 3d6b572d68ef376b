"""The line profiler as a user meets it: what can be added, when it collects, what it shows."""

import functools
import io
import json
import linecache
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from tenure.profiler import LineProfiler, LineRecord, ProfilerUsageError, RecordsDisplay

from ...programs import run_program

HERE = os.path.relpath(__file__)


def work(n):
    x = torch.ones(n)
    for _ in range(2):
        x = torch.cat([x, x])
    return x


def idle():
    pass


def ran(*functions, n=256, **options):
    profiler = LineProfiler(*functions, device="cpu", **options)
    with profiler:
        work(n)
    return profiler


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# --- what starts, and what does not


@pytest.mark.slow
def test_importing_the_room_and_making_a_profiler_start_nothing():
    done = run(
        "import sys, threading, tenure.profiler as p\n"
        "from torch.autograd import profiler\n"
        "before = profiler._enable_profiler\n"
        "p.LineProfiler(lambda: 1)\n"
        "assert sys.gettrace() is None and threading.gettrace() is None\n"
        "assert profiler._enable_profiler is before\n"
        "assert 'rich.console' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_profiling_prints_nothing_and_an_exit_inside_a_function_keeps_its_status():
    done = run_program(
        "import sys, torch\n"
        "from tenure.profiler import LineProfiler\n"
        "old = [torch.ones(10) for _ in range(3000)]\n"
        "def work():\n"
        "    old.clear()\n"
        "    t = torch.ones(10)\n"
        "    sys.exit(3)\n"
        "profiler = LineProfiler(work)\n"
        "profiler.enable()\n"
        "work()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.slow
def test_a_profiler_that_is_left_enabled_ends_with_the_program():
    done = run(
        "import torch\n"
        "from tenure.profiler import LineProfiler\n"
        "LineProfiler(torch.nn.Linear(2, 2)).enable()\n"
        "old = torch.ones(3)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_left_behind():
    from torch.autograd import profiler

    before = sys.gettrace(), profiler._enable_profiler, torch._C._autograd._profiler_enabled()
    ran(work)
    after = sys.gettrace(), profiler._enable_profiler, torch._C._autograd._profiler_enabled()
    assert after == before


# --- what can be profiled


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2

    @staticmethod
    def static():
        return torch.ones(1)

    @classmethod
    def of_class(cls):
        return torch.ones(2)

    @property
    def read(self):
        return torch.ones(3)


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("handed", "name"),
    [
        (Model().forward, "Model.forward"),
        (Model(), "Model.forward"),
        (Model.static, "Model.static"),
        (Model.__dict__["static"], "Model.static"),
        (Model.of_class, "Model.of_class"),
        (Model.read, "Model.read"),
        (functools.partial(work, 3), "work"),
        (wrapping(work), "work"),
        (functools.partial(wrapping(wrapping(work)), 3), "work"),
    ],
)
def test_what_has_a_python_function_in_it_can_be_profiled(handed, name):
    profiler = LineProfiler(handed, device="cpu")
    assert profiler.functions == (name,)
    with profiler:
        Model()(torch.ones(1))
        _ = Model.static(), Model.of_class(), Model().read, wrapping(work)(3)
    assert {record.function for record in profiler.records} == {name}
    assert all(record.source for record in profiler.records)


@pytest.mark.parametrize(
    ("handed", "message"),
    [
        (len, "^len has no lines to profile: it is of type builtin_function_or_method"),
        (Model, "^Model has no lines to profile: it is a class, and no Python function runs when"),
        (3, "^3 has no lines to profile: it is of type int"),
        (torch.add, r"\.add has no lines to profile: it is of type builtin_function_or_method"),
        (functools.partial(len), r"has no lines to profile: it is of type partial"),
    ],
)
def test_what_has_no_lines_is_refused(handed, message):
    profiler = LineProfiler(work, device="cpu")
    with pytest.raises(ProfilerUsageError, match=message):
        profiler.add_function(handed)
    assert profiler.functions == ("work",)


class Answering:
    """Has an answer for every attribute: itself, or one more of its kind."""

    def __init__(self, answer=None):
        self._answer = answer

    def __getattr__(self, name):
        return self if self._answer is None else self._answer()


@pytest.mark.parametrize("handed", [Answering(), Answering(lambda: Answering(Answering))])
def test_what_never_comes_to_a_function_is_refused(handed):
    with pytest.raises(
        ProfilerUsageError, match="has no lines to profile: it is of type Answering"
    ):
        LineProfiler(handed, device="cpu")


def test_a_function_that_wraps_itself_is_profiled():
    def own():
        return torch.ones(3)

    own.__wrapped__ = own
    profiler = LineProfiler(own, device="cpu")
    with profiler:
        own()
    assert [record.hits for record in profiler.records] == [1]


@pytest.mark.parametrize("of_another", [None, "import sys\nprint(sys.argv)\n"])
def test_code_without_source_has_numbers(of_another, monkeypatch):
    if of_another is not None:  # as Python 3.13 does with the text of `python -c`
        lines = of_another.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "<string>", (len(of_another), None, lines, "<string>"))
    names = {"torch": torch}
    exec("def made(n):\n    return torch.ones(n)\n", names)
    profiler = LineProfiler(names["made"], device="cpu")
    with profiler:
        names["made"](4)
    assert str(profiler) == "\n".join(
        [
            "## made, <string>:1, cpu",
            "line  hits  alloc  freed   net  peak  code",
            "   2     1   16 B    0 B  16 B  16 B",
        ]
    )


@pytest.mark.parametrize("edited", ["", "import torch\n'''\n", "x\ndef f(:\n (((\n", "\n  )\n x\n"])
def test_a_file_that_was_edited_meanwhile_loses_no_numbers(tmp_path, edited):
    path = tmp_path / "edited_meanwhile.py"
    namespace = {"torch": torch}
    exec(compile("\ndef f():\n    x = torch.ones(3)\n", path, "exec"), namespace)
    profiler = LineProfiler(namespace["f"], device="cpu")
    with profiler:
        namespace["f"]()
    path.write_text(edited)
    assert [(record.line, record.hits) for record in profiler.records] == [(3, 1)]
    # newer Pythons read what stands there now as source
    assert ["3", "1"] in [row.split()[:2] for row in str(profiler).splitlines()]


def test_two_functions_of_one_name_are_two():
    def make(n):
        names = {"torch": torch, "__name__": f"module{n}"}
        exec("\n" * n + "def same():\n    return torch.ones(1)\n", names)
        return names["same"]

    first, second = make(1), make(2)
    profiler = LineProfiler(first, second, device="cpu")
    with profiler:
        first(), second(), second()
    assert [(r.function, r.line, r.hits) for r in profiler.records] == [
        ("same", 3, 1),
        ("same", 4, 2),
    ]
    assert profiler.display("module2.same").records == profiler.display(second).records
    assert len(profiler.display("same").records) == 2


def test_two_functions_of_equal_code_are_two():
    source = "def same():\n    return torch.ones(1)\n"
    first, second = {"torch": torch}, {"torch": torch}
    exec(source, first)
    exec(source, second)
    assert first["same"].__code__ == second["same"].__code__
    profiler = LineProfiler(first["same"], second["same"], device="cpu")
    with profiler:
        first["same"](), second["same"](), second["same"]()
    assert [record.hits for record in profiler.records] == [1, 2]


# --- when it collects


def test_a_with_block_inside_another_of_the_same_profiler_leaves_it_on():
    profiler = LineProfiler(work, device="cpu")
    with profiler:
        with profiler:
            work(1)
        assert profiler.enabled
        work(1)
    assert not profiler.enabled
    assert profiler.records[0].hits == 2


def test_enabling_twice_is_enabling_once():
    profiler = LineProfiler(work, device="cpu")
    profiler.disable()
    profiler.enable()
    profiler.enable()
    work(1)
    profiler.disable()
    work(1)
    assert profiler.records[0].hits == 1


def test_cleared_it_begins_anew_with_its_functions():
    profiler = ran(work)
    profiler.clear()
    assert profiler.records == ()
    with profiler:
        work(1)
        profiler.clear()
        work(1)
    assert profiler.records[0].hits == 1


def test_functions_can_be_added_while_it_collects():
    profiler = LineProfiler(device="cpu")
    with profiler:
        work(1)
        profiler.add_function(work)
        work(1)
    assert profiler.records[0].hits == 1


def test_two_profilers_at_once_both_collect():
    outer, inner = LineProfiler(work, idle, device="cpu"), LineProfiler(work, device="cpu")
    with outer:
        with inner:
            work(256)
        work(256)
        idle()
    with inner:
        work(256)
    facts = [
        [(r.hits, r.allocated_bytes, r.freed_bytes) for r in p.records] for p in (outer, inner)
    ]
    assert facts[0][:-1] == facts[1]
    assert facts[1] == [(2, 2048, 0), (6, 0, 0), (4, 2 * 6144, 2 * 3072), (2, 0, 0)]


def test_profilers_can_end_in_any_order():
    first, second = LineProfiler(work, device="cpu"), LineProfiler(work, device="cpu")
    first.enable()
    second.enable()
    first.disable()
    work(1)
    second.disable()
    assert (first.records, second.records[0].hits) == ((), 1)


def test_results_survive_an_exception_and_a_keyboard_interrupt():
    def interrupted():
        x = torch.ones(10)
        raise KeyboardInterrupt(x.shape)

    profiler = LineProfiler(interrupted, device="cpu")
    with pytest.raises(KeyboardInterrupt), profiler:
        interrupted()
    assert [(r.hits, r.allocated_bytes) for r in profiler.records] == [(1, 40), (1, 0)]
    assert not profiler.enabled


# --- what it shows


def test_the_table_of_a_function():
    first = work.__code__.co_firstlineno
    assert str(ran(work)) == "\n".join(
        [
            f"## work, {HERE}:{first}, cpu",
            "line  hits    alloc    freed      net     peak  code",
            f"{first:4}                                            def work(n):",
            f"{first + 1:4}     1  1.0 KiB      0 B  1.0 KiB  1.0 KiB      x = torch.ones(n)",
            f"{first + 2:4}     3      0 B      0 B      0 B  4.0 KiB      for _ in range(2):",
            f"{first + 3:4}     2  6.0 KiB  3.0 KiB  3.0 KiB  6.0 KiB          "
            "x = torch.cat([x, x])",
            f"{first + 4:4}     1      0 B      0 B      0 B  4.0 KiB      return x",
        ]
    )


def test_each_function_has_a_table_and_one_that_did_not_run_says_so():
    first = idle.__code__.co_firstlineno
    tables = ran(work, idle).display().text(width=300).split("\n\n")
    assert tables[0].startswith("## work, ")
    assert tables[1] == (
        f"## idle, {HERE}:{first}\n"
        "No lines: it did not run while the profiler was enabled. Compiled code has no lines; "
        "before Python 3.12, neither has a thread that was started before."
    )


@pytest.mark.parametrize(
    ("profiler", "enabled", "text"),
    [
        (
            LineProfiler(device="cpu"),
            True,
            "No lines: there is no function to profile. Pass functions to LineProfiler(), or add "
            "them with add_function().",
        ),
        (
            LineProfiler(work, device="cpu"),
            False,
            "No lines: the profiler was never enabled. Call the functions in a `with` block.",
        ),
        (
            LineProfiler(work, idle, device="cpu"),
            True,
            "No lines: work, idle did not run while the profiler was enabled. Compiled code has no "
            "lines; before Python 3.12, neither has a thread that was started before.",
        ),
    ],
)
def test_an_empty_result_says_why(profiler, enabled, text):
    if enabled:
        with profiler:
            pass
    assert profiler.display().text(width=300) == text
    assert " ".join(text.split()) in " ".join(profiler._repr_html_().split())
    console = Console(file=io.StringIO(), width=300)
    console.print(profiler)
    assert console.file.getvalue().strip() == text


def test_functions_are_shown_themselves_or_by_name():
    profiler = ran(work, idle)
    shown = [profiler.display(func).records for func in (work, "work", [work], ["work"], None)]
    assert shown == [profiler.records] * 5
    with pytest.raises(
        ProfilerUsageError,
        match=r"^nothing is not profiled; what is: work, idle. Add it with add_function\(\).$",
    ):
        profiler.display("nothing")
    with pytest.raises(ProfilerUsageError, match=r"^wrapping is not profiled; what is: work"):
        profiler.print_stats(wrapping)
    with pytest.raises(ProfilerUsageError, match=r"^3 has no lines to profile: it is of type int"):
        profiler.display(3)


def test_no_functions_show_nothing_and_say_so():
    text = str(ran(work, idle).display([]))
    assert text == "No lines: none of the functions was asked for. Without func, all are shown."


def test_columns_are_chosen_by_name():
    text = str(ran(work).display(columns=["peak", "hits"])).splitlines()
    assert text[1:4:2] == ["line     peak  hits  code", text[3]]
    assert text[3].split()[1:4] == ["1.0", "KiB", "1"]


def test_a_field_of_memory_stats_is_an_empty_column_on_the_cpu():
    text = str(ran(work).display(columns="active_bytes.all.peak")).splitlines()
    assert text[1] == "line  active_bytes.all.peak  code"
    assert text[3].split(maxsplit=1)[1] == "x = torch.ones(n)"


@pytest.mark.parametrize(
    "name", ["allocated", "active_bytes.all", 3, "foo.bar.baz", "activ_bytes.all.peak"]
)
def test_an_unknown_column_is_refused(name):
    message = (
        rf"^There is no column {name!r}. There are hits, alloc, freed, net, peak, and as the "
        r"fields of a device's memory_stats\(\), one of allocation, .*, active_bytes, .*, with "
        r".all or .* behind it, as in active_bytes.all.peak.$"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        ran(work).display(columns=[name])


def test_statistics_go_to_the_standard_output_of_the_moment(monkeypatch):
    profiler, later = ran(work), io.StringIO()
    monkeypatch.setattr(sys, "stdout", later)
    profiler.print_stats()
    assert later.getvalue() == f"{profiler.display()}\n"
    given = io.StringIO()
    profiler.print_stats(work, ("hits",), given)
    assert given.getvalue() == f"{profiler.display(columns=('hits',))}\n"


def test_a_dict_of_it_is_json():
    facts = ran(work).display().to_dict()
    assert json.loads(json.dumps(facts)) == facts
    first = work.__code__.co_firstlineno
    assert facts["sections"][0]["rows"][1][2] == {
        "function": "work",
        "file": __file__,
        "line": first + 1,
        "source": "    x = torch.ones(n)",
        "device": "cpu",
        "hits": 1,
        "allocated_bytes": 1024,
        "freed_bytes": 0,
        "net_bytes": 1024,
        "peak_bytes": 1024,
        "exact": True,
        "peak_exact": True,
        "statistics": {},
    }


def test_records_and_displays_speak_for_themselves():
    profiler = ran(work)
    assert repr(profiler) == "<LineProfiler of 1 function on cpu, disabled>"
    assert isinstance(profiler.display(), RecordsDisplay)
    assert repr(profiler.display()) == str(profiler)
    record = profiler.records[0]
    assert isinstance(record, LineRecord)
    with pytest.raises(AttributeError, match="hits"):
        record.hits = 3


def test_records_can_be_read_while_it_collects():
    profiler = LineProfiler(work, device="cpu")
    with profiler:
        work(1)
        assert profiler.records[0].hits == 1
        assert "torch.ones" in str(profiler)


def test_a_profiler_leaves_no_garbage():
    # In a process of its own: what other tests compiled becomes garbage when it likes.
    done = run_program(
        "import gc, torch\n"
        "from tenure.profiler import LineProfiler\n"
        "def work():\n"
        "    return torch.cat([torch.ones(8), torch.ones(8)])\n"
        "def ran():\n"
        "    with LineProfiler(work, device='cpu') as profiler:\n"
        "        work()\n"
        "    assert profiler.records[0].hits == 1\n"
        "ran()\n"
        "gc.collect()\n"
        "gc.disable()\n"
        "gc.set_debug(gc.DEBUG_SAVEALL)\n"
        "ran()\n"
        "gc.collect()\n"
        "print([type(each) for each in gc.garbage])\n"
        "gc.set_debug(0)\n"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- what memlab's own tests do, with their outcome checked


def part1(x):
    # a comment stands first
    linear = torch.nn.Linear(100, 100)
    return part11(linear(x))


def part11(x):
    return subpart11(x)


def subpart11(x):
    return x * 2


def part2(x):
    return part1(x) + 1


def test_display_shows_only_what_was_registered():
    profiler = LineProfiler(subpart11, part2, device="cpu")
    with profiler:
        part2(torch.ones(100, 100))
    text = str(profiler.display())
    headings = [line.split(",")[0] for line in text.splitlines() if line.startswith("##")]
    assert headings == ["## subpart11", "## part2"]
    assert "def subpart11(x):" in text
    assert "def part2(x):" in text
    assert "def part11" not in text


def test_line_report_of_enable_and_disable():
    profiler = LineProfiler(part1, part2, device="cpu")
    profiler.enable()
    part2(torch.ones(100, 100))
    profiler.disable()
    by_source = {r.source.strip(): r.allocated_bytes for r in profiler.records}
    n = 4 * 100 * 100
    assert by_source["return part11(linear(x))"] >= 2 * n
    assert n <= by_source["return part1(x) + 1"] <= n + 64


def test_line_report_of_a_method():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(10, 10)

        def forward(self, x):
            return self.linear(x)

    net = Net()
    with LineProfiler(net.forward, device="cpu") as profiler:
        net(torch.ones(4, 10))
    assert [(r.hits, r.allocated_bytes) for r in profiler.records] == [(1, 160)]
