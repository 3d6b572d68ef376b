"""The magics, run by a real InteractiveShell."""

import re

import pytest
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output

from tenure.profiler import LineProfiler, ProfilerUsageError
from tests.shells import opened, ran

WORK = "import torch\ndef work(n):\n    x = torch.ones(n)\n    return (x * 2).sum()\n"


@pytest.fixture
def shell():
    """A shell with the extension loaded and a function `work` defined."""
    with opened() as shell:
        ran(shell, WORK)
        yield shell


def table(captured):
    """The one table that was displayed, as text."""
    (shown,) = [output.data["text/plain"] for output in captured.outputs]
    return shown


def test_a_statement_is_profiled_and_shown_as_a_whole(shell):
    shown = table(ran(shell, "%mlrun -f work -d cpu work(256)"))
    lines = shown.splitlines()
    assert lines == [
        "## work, Cell In[2], line 2, cpu",
        "line  hits    alloc    freed      net     peak  code",
        "   2                                            def work(n):",
        "   3     1  1.0 KiB      0 B  1.0 KiB  1.0 KiB      x = torch.ones(n)",
        "   4     1  1.0 KiB  2.0 KiB  -1020 B  2.0 KiB      return (x * 2).sum()",
    ]


def test_a_cell_can_define_again_what_it_profiles(shell):
    captured = ran(
        shell,
        "%%mlrun -f work -d cpu\nwork(256)\ndef work(n):\n    return torch.zeros(n)\nwork(1024);\n",
    )
    assert "x = torch.ones(n)" in table(captured)
    assert "return torch.zeros(n)" in table(captured)
    assert "4.0 KiB" in table(captured)


def test_several_functions_and_methods_are_profiled(shell):
    ran(shell, "class Net:\n    def forward(self, x):\n        return x + 1\n")
    ran(shell, "def other(): return torch.ones(8)")
    shown = table(
        ran(
            shell,
            '%mlrun --function Net.forward -f "work" -fother -d cpu '
            "Net().forward(work(4)); other()",
        )
    )
    assert re.findall(r"^## (\S+),", shown, re.MULTILINE) == ["Net.forward", "work", "other"]


def test_a_device_is_chosen_by_index_or_by_name(sim, shell):
    ran(shell, "def there(): return torch.ones(256, device='sim')")
    for flags in ("-g 0", "--gpu 0", "--gpu=0", "-d sim", "--device sim:0", "-dsim:0"):
        shown = table(ran(shell, f"%mlrun -f there {flags} kept = there()"))
        assert ", sim:0\n" in shown
        assert "1.0 KiB" in shown


def test_quiet_shows_nothing_and_return_gives_the_profiler(shell):
    captured = ran(shell, "p = %mlrun -q -r -f work -d cpu x = work(256)")
    assert (captured.stdout, captured.stderr, captured.outputs) == ("", "", [])
    assert type(shell.user_ns["p"]) is LineProfiler
    assert [r.net_bytes for r in shell.user_ns["p"].records] == [1024, -1020]
    assert ran(shell, "q = %mlrun --return-profiler -f work -d cpu work(4)").outputs
    assert ran(shell, "n = %mlrun -f work -d cpu work(4)").outputs
    assert shell.user_ns["n"] is None


def test_an_error_of_the_cell_goes_on_and_what_was_collected_is_shown(shell):
    ran(shell, "def breaks():\n    x = torch.ones(256)\n    raise ValueError(x.numel())")
    with capture_output() as captured:
        result = shell.run_cell("%mlrun -f breaks -d cpu breaks()")
    assert type(result.error_in_exec) is ValueError
    assert "1.0 KiB" in captured.outputs[0].data["text/plain"]
    assert "ValueError" in captured.stdout + captured.stderr


NO_NAME = (
    "not a name, such as func or Net.forward. Assign what you mean to a variable, and name that."
)
REFUSED = [
    ("work(4)", "%mlrun: the following arguments are required: -f/--function. See %mlrun? for"),
    ("-f work -z 3 work(4)", "%mlrun: unrecognized arguments: -z. See %mlrun? for what there is."),
    ("-f work -g first work(4)", "%mlrun: argument -g/--gpu: invalid int value: 'first'. See"),
    ("-f Net().forward -d cpu ran = True", f"%mlrun -f Net().forward: {NO_NAME}"),
    ("-f work.1 -d cpu ran = True", f"%mlrun -f work.1: {NO_NAME}"),
    ("-f work -g 0 -d cpu work(4)", "target_gpu and device"),
    (
        "-f work -c peak work(4)",
        "%mlrun: unrecognized arguments: -c. See %mlrun? for what there is.",
    ),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[options for options, _ in REFUSED])
def test_bad_options_are_named_and_nothing_runs(shell, options, told):
    with pytest.raises((UsageError, ProfilerUsageError), match=f"^{re.escape(told)}"):
        ran(shell, f"%mlrun {options}")
    assert "ran" not in shell.user_ns


def test_what_was_not_found_is_named(shell):
    ran(shell, "class Net:\n    def forward(self):\n        pass")
    with pytest.raises((UsageError, ProfilerUsageError)) as caught:
        ran(shell, "%mlrun -f Net.forwrd -d cpu ran = True")
    assert str(caught.value) == (
        "%mlrun -f Net.forwrd: type object 'Net' has no attribute 'forwrd', neither before the "
        "code nor after it, which ran. Check the spelling, or let the code define it."
    )
    assert shell.user_ns["ran"] is True


def test_a_statement_after_the_options_of_a_cell_runs_first(shell):
    ran(shell, "%%mlrun -q -f work -d cpu n = 4\nx = work(n)")
    assert shell.user_ns["x"] == 8
