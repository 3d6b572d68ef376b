"""The line profiler as a user meets it: what can be added, when it collects, what it shows."""

import functools
import io
import json
import linecache
import subprocess
import sys

import pytest
import torch

from tenure.profiler import LineProfiler, ProfilerUsageError

from .truth import profiled


def work(n):
    x = torch.ones(n)
    for _ in range(2):
        x = torch.cat([x, x])
    return x


def idle():
    pass


def ran(*functions):
    return profiled(lambda: work(256), *functions)


# --- what starts, and what does not


@pytest.mark.slow
def test_making_a_profiler_starts_nothing_and_one_left_enabled_ends_with_the_program():
    program = (
        "import sys, threading, tenure.profiler as p\n"
        "from torch.autograd import profiler\n"
        "import torch\n"
        "before = profiler._enable_profiler\n"
        "old = [torch.ones(10) for _ in range(3000)]\n"
        "def work():\n"
        "    old.clear()\n"
        "    t = torch.ones(10)\n"
        "    sys.exit(3)\n"
        "found = p.LineProfiler(work)\n"
        "assert sys.gettrace() is None and threading.gettrace() is None\n"
        "assert profiler._enable_profiler is before\n"
        "assert 'rich.console' not in sys.modules and 'pandas' not in sys.modules\n"
        "found.enable()\n"
        "work()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


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


class Answering:
    """Has an answer for every attribute."""

    def __getattr__(self, name):
        return Answering()


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
        (Model.__dict__["static"], "Model.static"),
        (Model.of_class, "Model.of_class"),
        (Model.read, "Model.read"),
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
        (Answering(), "has no lines to profile: it is of type Answering"),
    ],
)
def test_what_has_no_lines_is_refused(handed, message):
    profiler = LineProfiler(work, device="cpu")
    with pytest.raises(ProfilerUsageError, match=message):
        profiler.add_function(handed)
    assert profiler.functions == ("work",)


def test_code_without_source_has_numbers(monkeypatch):
    # as Python 3.13 does with the text of `python -c`
    lines = ["import sys\n", "print(sys.argv)\n"]
    monkeypatch.setitem(linecache.cache, "<string>", (27, None, lines, "<string>"))
    names = {"torch": torch}
    exec("def made(n):\n    return torch.ones(n)\n", names)
    profiler = profiled(lambda: names["made"](4), names["made"])
    assert str(profiler) == "\n".join(
        [
            "## made, <string>:1, cpu",
            "line  hits  alloc  freed   net  peak  code",
            "   2     1   16 B    0 B  16 B  16 B",
        ]
    )


@pytest.mark.parametrize("edited", ["", "x\ndef f(:\n (((\n"])
def test_a_file_that_was_edited_meanwhile_loses_no_numbers(tmp_path, edited):
    path = tmp_path / "edited_meanwhile.py"
    namespace = {"torch": torch}
    exec(compile("\ndef f():\n    x = torch.ones(3)\n", path, "exec"), namespace)
    profiler = profiled(namespace["f"], namespace["f"])
    path.write_text(edited)
    assert [(record.line, record.hits) for record in profiler.records] == [(3, 1)]
    # newer Pythons read what stands there now as source
    assert ["3", "1"] in [row.split()[:2] for row in str(profiler).splitlines()]


def test_two_functions_of_one_name_or_of_equal_code_are_two():
    def make(n):
        names = {"torch": torch, "__name__": f"module{n}"}
        exec("def same():\n    return torch.ones(1)\n", names)
        return names["same"]

    first, second = make(1), make(2)
    assert first.__code__ == second.__code__
    profiler = LineProfiler(first, second, device="cpu")
    with profiler:
        first(), second(), second()
    assert [(r.function, r.hits) for r in profiler.records] == [("same", 1), ("same", 2)]
    assert profiler.display("module2.same").records == profiler.display(second).records
    assert len(profiler.display("same").records) == 2


# --- when it collects


def test_it_collects_from_the_first_enable_to_the_last_end():
    profiler = LineProfiler(device="cpu")
    profiler.disable()
    with profiler:
        work(1)
        profiler.add_function(work)
        with profiler:
            work(1)
        assert profiler.enabled
        profiler.enable()
        work(1)
        assert profiler.records[0].hits == 2
        profiler.clear()
        work(1)
    assert not profiler.enabled
    work(1)
    assert profiler.records[0].hits == 1
    profiler.clear()
    with pytest.raises(TypeError), profiler:
        work("no size")
    assert (profiler.enabled, profiler.records[0].hits) == (False, 1)
    profiler.clear()
    assert profiler.records == ()


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
    outer.clear(), inner.clear()
    outer.enable(), inner.enable(), outer.disable()
    work(1)
    inner.disable()
    assert (outer.records, inner.records[0].hits) == ((), 1)


# --- what it shows


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
    text = str(profiler.display([]))
    assert text == "No lines: none of the functions was asked for. Without func, all are shown."
    tables = profiler.display().text(width=300).split("\n\n")
    assert tables[1].splitlines()[1].startswith("No lines: it did not run while the profiler was")


def test_columns_are_chosen_by_name_and_the_text_goes_where_it_is_wanted(monkeypatch):
    profiler, later, given = ran(work), io.StringIO(), io.StringIO()
    text = str(profiler.display(columns=["peak", "hits"])).splitlines()
    assert text[1] == "line     peak  hits  code"
    assert text[3].split()[1:4] == ["1.0", "KiB", "1"]
    text = str(profiler.display(columns="hits")).splitlines()
    assert text[1] == "line  hits  code"
    assert text[3].split(maxsplit=2)[1:] == ["1", "x = torch.ones(n)"]
    monkeypatch.setattr(sys, "stdout", later)
    profiler.print_stats()
    assert later.getvalue() == f"{profiler.display()}\n" == f"{profiler.display()!r}\n"
    profiler.print_stats(work, ("hits",), given)
    assert given.getvalue() == f"{profiler.display(columns=('hits',))}\n"
    assert repr(profiler) == "<LineProfiler of 1 function on cpu, disabled>"


def test_an_unknown_column_is_refused():
    message = (
        r"^There is no column 'active_bytes.all.peak'. There are hits, alloc, freed, net, peak. Of "
        r"the fields of memory_stats\(\) there are none: for active_bytes.all.peak ask for peak.$"
    )
    with pytest.raises(ProfilerUsageError, match=message):
        ran(work).display(columns=["active_bytes.all.peak"])


def test_a_dict_of_it_is_json():
    facts = ran(work).display().to_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["sections"][0]["rows"][1][2] == {
        "function": "work",
        "file": __file__,
        "line": work.__code__.co_firstlineno + 1,
        "source": "    x = torch.ones(n)",
        "device": "cpu",
        "hits": 1,
        "allocated_bytes": 1024,
        "freed_bytes": 0,
        "net_bytes": 1024,
        "peak_bytes": 1024,
        "exact": True,
        "peak_exact": True,
    }
