"""`tenure fit` says whether work fits, by its text, its JSON, its page and its exit code."""

import json
import os
import sys
import warnings

import pytest
import torch

from tenure.adaptive import Advice, PeakReport
from tests.programs import main, run_program

PROGRAM = """
import copy

import torch
from torch import nn

VALUES = torch.tensor([2.0, 3.0])


def model():
    return nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))


def setup():
    net = model()
    return lambda x: net(x).square().mean(), torch.randn(512, 256)


def trained():
    net = model()
    sgd = torch.optim.SGD(net.parameters())
    return lambda x: net(x).square().mean(), torch.randn(512, 256), sgd


def huge():
    net = nn.Linear(2**20, 2**20).to(torch.bfloat16)
    return lambda x: net(x).float().mean(), torch.zeros(4, 2**20, dtype=torch.bfloat16)


def on_meta():
    with torch.device("meta"):
        net = nn.Linear(2**18, 2**18)
    return lambda x: net(x).mean(), torch.zeros(2, 2**18)


def needs_data():
    net = nn.Linear(int(torch.ones(7).sum().numpy()), 2)
    return lambda x: net(x).mean(), torch.zeros(4, 7)


def talks():
    print("hello")
    return setup()


class Output:
    def __init__(self, loss):
        self.loss = loss


def has_a_loss():
    net = model()
    return lambda x: Output(net(x).square().mean()), torch.randn(512, 256)


def copied():
    layer = nn.Linear(4, 4)
    net = nn.Sequential(*[copy.deepcopy(layer) for _ in range(2)])
    return lambda x: net(x).mean(), torch.zeros(2, 4)


def wants_a_size(n_rows, *others, scale=1):
    return setup()


def runs_backward(returned=lambda loss: loss):
    net = model()
    sgd = torch.optim.SGD(net.parameters())

    def train_step(x):
        sgd.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        sgd.step()
        return returned(loss)

    return train_step, torch.randn(512, 256)


def runs_backward_and_detaches():
    return runs_backward(torch.Tensor.detach)


def two_inputs():
    net = model()
    batch = {"x": torch.randn(512, 256), "y": [torch.zeros(512), 3]}
    return lambda b: (net(b["x"]).mean(1) - b["y"][0]).square().mean(), batch


def steps_most():
    net = model()
    adam = torch.optim.Adam(net.parameters())
    return lambda x: net(x).square().mean(), torch.randn(2, 256), adam


def cached():
    def fn(batch):
        with torch.no_grad():
            return sum(part.exp().exp().sum() for part in batch)

    return fn, [torch.randn(6_000, 700), torch.randn(5_000, 700)]


def cached_samples():
    return cached()[0], [torch.randn(6_000, 700), torch.randn(6_000, 500)]


def one_sample():
    net = model()
    return lambda x: net(x).mean(), torch.randn(1, 256)


def uneven():
    net = model()
    return lambda b: net(b[0]).mean() + b[1].sum(), (torch.randn(8, 256), torch.randn(3))


def returns_three():
    return 3


def returns_a_list_of_an_optimizer():
    return (model(), torch.zeros(2, 256), "sgd")


def raises():
    raise ZeroDivisionError("nobody\\nhome")


def leaves():
    raise SystemExit(0)


def fails_in_the_step():
    def fn(x):
        raise KeyError("label")

    return fn, torch.zeros(3)


def moved():
    device = torch.device("cuda")
    net = nn.Linear(2**18, 2**18).cuda().to("cuda:0").to(device)
    return lambda x: net(x).mean(), torch.zeros(2, 2**18, device=device)


def talks_of_a_loss():
    net = model()
    x = torch.randn(512, 256)

    class Output(dict):
        def __init__(self, logits):
            super().__init__(loss=logits.square().mean(), logits=logits)
            self.loss = self["loss"]

    return lambda x: Output(net(x)), x


def two_losses():
    net = model()
    return lambda x: (net(x).square().mean(1), net[0].weight.sum()), torch.randn(512, 256)


def normed():
    net = nn.Sequential(nn.BatchNorm1d(256), *model())
    return lambda x: net(x).square().mean(), torch.randn(512, 256)


def infers():
    net = model()

    @torch.no_grad()
    def fn(x):
        return net(net(net(x)))

    return fn, torch.randn(4096, 256)


class Holder:
    setup = staticmethod(setup)


number = 3
"""


ADVICE = """

What would help:
- use checkpoints: saves 1.0 MiB
    checkpoint(block, block, block, block, block, block, block, block, block,
      block, block, f())
- compute in many words many words many words many words many words many words
  many words many words many words : saves 6 B; gives other numbers
    now()

What would not help:
- wish: would not lower the peak
    wish()
"""


@pytest.fixture(autouse=True)
def _program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # a machine with an accelerator compares with what is free there
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    yield
    sys.modules.pop("program", None)


def fit(capsys, function, *arguments):
    code = main(["fit", f"program.py:{function}", *arguments])
    return code, capsys.readouterr()


def test_what_fits_ends_with_0_and_says_how_much_is_left(capsys):
    code, printed = fit(capsys, "setup", "--device-memory", "1GiB", "--device", "cpu")
    lines = printed.out.splitlines()
    assert code == 0
    assert lines[0].startswith("It fits in 1.0 GiB: ")
    assert lines[0].endswith(" MiB to spare.")
    assert lines[1].startswith("A step takes ")
    assert "(program.py:" in lines[1]
    assert any(line.startswith("category") for line in lines)
    assert any(line.split()[:3] == ["budget", "1.0", "GiB"] for line in lines)
    assert printed.err == ""


def test_a_step_that_runs_backward_itself_returns_its_loss_detached(capsys):
    arguments = ("runs_backward_and_detaches", "--device-memory", "1GiB", "--device", "cpu")
    assert fit(capsys, *arguments)[0] == 0


def test_what_does_not_fit_ends_with_1_and_names_the_micro_batch_that_does(capsys):
    code, printed = fit(capsys, "trained", "--device-memory", "8MiB", "--device", "cpu", "--json")
    found = json.loads(printed.out)
    smaller = found["micro_batch"]
    assert code == 1
    assert found["fits"] is False
    assert found["spare_bytes"] == 8 * 2**20 - found["report"]["needed_bytes"] < 0
    assert smaller["fits"]
    assert 1 < smaller["size"] < smaller["batch"] == 512
    assert smaller["needed_bytes"] <= 8 * 2**20
    # the gradients of one micro-batch are beside the next
    assert smaller["needed_bytes"] > 4 * 2**20
    code, printed = fit(capsys, "trained", "--device-memory", "8MiB", "--device", "cpu")
    assert (
        f"The largest micro-batch that fits is {smaller['size']}; the batch has 512 samples; in "
        f"micro-batches of {smaller['size']} the step takes "
    ) in " ".join(printed.out.split())


@pytest.mark.slow
def test_a_micro_batch_that_fits_takes_no_more_than_there_is(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ("cached_samples", "--device", "cuda", "--device-memory", "64MiB")
    found = json.loads(fit(capsys, *arguments, "--json")[1].out)["micro_batch"]
    assert found["fits"]
    assert found["needed_bytes"] > 64 << 20
    assert (
        f"in micro-batches of {found['size']} the step fits in 64.0 MiB once the allocator gives "
        "back what it caches: with more memory it would keep "
    ) in " ".join(fit(capsys, *arguments)[1].out.split())


def test_modules_that_copy_their_layers_are_no_bug_of_the_program(capsys):
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        code, printed = fit(capsys, "copied", "--device-memory", "1GiB", "--device", "cpu")
    finally:
        torch.set_warn_always(before)
    assert (code, printed.err) == (0, "")


def test_a_peak_in_the_step_of_the_optimizer_has_no_line_of_the_command(capsys):
    code, printed = fit(
        capsys, "steps_most", "--device-memory", "1GiB", "--device", "cpu", "--json"
    )
    report = json.loads(printed.out)["report"]
    assert (code, report["phase"], report["place"]) == (0, "optimizer step", "")


def test_of_an_object_with_a_loss_the_advice_passes_the_loss_on(capsys):
    _, printed = fit(capsys, "has_a_loss", "--device-memory", "8MiB", "--device", "cpu")
    assert "step(lambda batch: fn(batch).loss, batch, maximum=" in " ".join(printed.out.split())


def test_where_no_micro_batch_fits_it_says_so(capsys):
    code, printed = fit(capsys, "setup", "--device-memory", "3MiB", "--device", "cpu")
    assert code == 1
    assert "\nNo micro-batch fits: in micro-batches of 1 the step takes " in printed.out


@pytest.mark.parametrize("function", ["one_sample", "uneven"])
def test_a_batch_that_can_not_be_split_has_no_micro_batch(function, capsys):
    code, printed = fit(capsys, function, "--device-memory", "1KiB", "--device", "cpu")
    assert code == 1
    assert "micro-batch" not in printed.out


def test_a_batch_of_containers_is_split(capsys):
    code, printed = fit(
        capsys, "two_inputs", "--device-memory", "5MiB", "--device", "cpu", "--json"
    )
    assert code == 1
    assert json.loads(printed.out)["micro_batch"]["batch"] == 512


@pytest.mark.slow
@pytest.mark.parametrize("function", ["talks_of_a_loss", "two_losses", "normed", "infers"])
def test_whatever_a_step_returns_is_split(function, capsys):
    arguments = ("--device-memory", "7MiB", "--device", "cpu", "--json")
    code, printed = fit(capsys, function, *arguments)
    found = json.loads(printed.out)["micro_batch"]
    assert code == 1
    assert found["fits"]
    assert 1 < found["size"] < found["batch"]


def test_on_an_accelerator_what_its_allocator_needs_is_compared(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, printed = fit(capsys, "trained", "--device", "cuda", "--json")
    report = json.loads(printed.out)["report"]
    assert report["needed_bytes"] > report["peak_bytes"]
    code, printed = fit(capsys, "trained", "--device-memory", str(report["peak_bytes"]), "--json")
    found = json.loads(printed.out)["micro_batch"]
    assert code == 1
    # what cuBLAS keeps does not become less
    assert not found["fits"]
    assert found["needed_bytes"] > report["peak_bytes"]
    # torch warns of autocast for what has no driver
    assert printed.err == ""


def test_without_a_known_memory_it_reports_alone(capsys):
    code, printed = fit(capsys, "setup")
    assert code == 0
    assert printed.out.startswith("A step takes ")
    assert "budget" not in printed.out


def test_what_is_free_on_the_accelerator_is_compared_with(capsys, monkeypatch):
    asked = []

    class Module:
        @staticmethod
        def mem_get_info(device):
            return 10 * 2**30, 20 * 2**30

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cpu"))
    monkeypatch.setattr(
        "tenure._devices.accelerator_of",
        lambda device: asked.append(device) or (Module, torch.device("cpu")),
    )
    code, printed = fit(capsys, "setup")
    assert code == 0
    assert asked == [torch.device("cpu")]
    assert printed.out.startswith("It fits in 10.0 GiB: ")


def test_a_model_larger_than_the_machine_is_made_and_converted_without_memory(capsys):
    code, printed = fit(capsys, "huge", "--device-memory", "80GiB", "--device", "cpu", "--json")
    assert code == 1
    assert json.loads(printed.out)["report"]["categories"]["parameters"] == 2 * (2**40 + 2**20)
    assert printed.err == ""


def test_a_function_that_needs_data_runs_as_it_is_and_that_is_told(capsys):
    code, printed = fit(capsys, "needs_data", "--device-memory", "1MiB", "--device", "cpu")
    assert code == 0
    assert printed.err.startswith(
        "program.py:needs_data fails on tensors without data (RuntimeError: .numpy() is not "
    )
    assert printed.err.endswith("): now it runs as it is, in memory.\n")


def test_json_is_all_that_is_printed_and_reads_back(capsys):
    code, printed = fit(capsys, "talks", "--json")
    found = json.loads(printed.out)
    assert code == 0
    assert printed.err == "hello\n"
    assert (found["fits"], found["budget_bytes"], found["spare_bytes"]) == (None, None, None)
    assert {"what", "how", "peak_bytes", "saves_bytes"} <= set(found["advice"][0])
    report = PeakReport.from_dict(found["report"])
    assert report.peak_bytes == found["report"]["peak_bytes"]


def test_advice_is_told_where_it_does_not_fit_and_not_asked_for_elsewhere(capsys, monkeypatch):
    asked = []
    told = (
        Advice("use checkpoints", f"checkpoint({'block, ' * 11}f())", 6 * 2**20, 2**20),
        Advice("compute in " + "many words " * 9, "now()", 2**20, 6, changes_numbers=True),
        Advice("wish", "wish()", 2**30, -1),
    )
    monkeypatch.setattr(PeakReport, "advice", property(lambda report: asked.append(1) or told))
    fit(capsys, "setup", "--device-memory", "1GiB", "--device", "cpu", "--json")
    assert asked == []
    code, printed = fit(capsys, "setup", "--device-memory", "1KiB", "--device", "cpu")
    assert code == 1
    assert printed.out.endswith(ADVICE)
    _, printed = fit(capsys, "setup", "--device-memory", "1KiB", "--device", "cpu", "--json")
    assert json.loads(printed.out)["advice"][0] == {
        "what": "use checkpoints",
        "how": f"checkpoint({'block, ' * 11}f())",
        "peak_bytes": 6 * 2**20,
        "saves_bytes": 2**20,
        "changes_numbers": False,
    }


def test_a_terminal_shows_a_table_and_every_note(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, printed = fit(capsys, "trained", "--device-memory", "8MiB", "--device", "cpu")
    assert code == 1
    assert "parameters" in printed.out
    assert "category" in printed.out
    assert "The largest micro-batch that fits is " in printed.out


@pytest.mark.parametrize("target", ["program:setup", "program:Holder.setup", "program.py:setup"])
def test_a_function_is_named_by_its_module_or_its_file(target, capsys):
    assert main(["fit", target]) == 0
    assert capsys.readouterr().out.startswith("A step takes ")


def test_a_file_with_the_name_of_a_module_that_is_loaded_is_refused(tmp_path, capsys):
    (tmp_path / "json.py").write_text(PROGRAM, "utf-8")
    assert main(["fit", "json.py:setup"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tenure fit: error: 'json.py' has the name of another module, ")
    assert error.endswith("json/__init__.py. Rename the file.\n")


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("program.py", "'program.py' names no function. Write MODULE:FUNCTION, as train.py:setup."),
        ("program:", "'program:' names no function. Write MODULE:FUNCTION, as train.py:setup."),
        ("gone.py:setup", "There is no file 'gone.py'. Give the path of a Python file."),
        ("gone:setup", "There is no module 'gone'. It is looked for in this directory and among "),
        ("program:seput", "program has no function 'seput'. Is it defined there?"),
        ("program:number", "program has no function 'number'. Is it defined there?"),
        ("program:returns_three", "program:returns_three returned int. Return (fn, batch) or "),
        (
            "program:returns_a_list_of_an_optimizer",
            "program:returns_a_list_of_an_optimizer returned (Sequential, Tensor, str). Return ",
        ),
        (
            "program:runs_backward",
            "The function returned a loss whose graph has already run backward, so it ran backward "
            "itself. Return None or loss.detach().",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(target, complaint, capsys):
    assert main(["fit", target]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tenure fit: error: {complaint}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raises", "ZeroDivisionError: nobody."),
        ("leaves", "SystemExit: 0."),
        ("fails_in_the_step", "KeyError: 'label'."),
    ],
)
def test_an_error_of_the_program_ends_with_2_after_its_own_traceback(function, complaint, capsys):
    code, printed = fit(capsys, function)
    lines = printed.err.splitlines()
    assert code == 2
    assert lines[-1] == f"tenure fit: error: program.py:{function} raised {complaint}"
    first = next(line for line in lines if line.startswith("  File "))
    assert "program.py" in first


@pytest.mark.parametrize("function", ["moved", "on_meta"])
def test_a_device_that_is_not_here_is_no_obstacle(function, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed = fit(capsys, function, "--device-memory", "80GiB", "--device", "cpu", "--json")
    found = json.loads(printed.out)["report"]
    assert code == 1
    assert printed.err == ""
    assert found["device"] == "cpu"
    assert found["categories"]["parameters"] == 4 * (2**36 + 2**18)


def test_a_size_that_is_none_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "program:setup", "--device-memory", "24 gigs"])
    assert capsys.readouterr().err == (
        "tenure fit: error: argument --device-memory: '24 gigs' is not a number of bytes. Write an "
        'int, or a number and a unit, such as "64MiB" or "1.5 GiB". See tenure fit --help.\n'
    )


def test_a_number_that_lacks_its_unit_is_refused_and_small_sizes_with_one_are_not(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "program:setup", "--device-memory", "24"])
    assert capsys.readouterr().err == (
        "tenure fit: error: argument --device-memory: '24' is 24 bytes; write the unit, such as "
        "24GiB, or 24B if it is meant. See tenure fit --help.\n"
    )
    assert fit(capsys, "one_sample", "--device-memory", "24B", "--device", "cpu")[0] == 1


def test_what_fits_once_a_cache_is_given_back_has_nothing_to_spare(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, printed = fit(capsys, "cached", "--device", "cuda", "--json")
    needed_bytes = json.loads(printed.out)["report"]["needed_bytes"]
    memory = ("--device-memory", str(needed_bytes - 2**21), "--json")
    code, printed = fit(capsys, "cached", "--device", "cuda", *memory)
    found = json.loads(printed.out)
    assert code == 0
    assert (found["fits"], found["spare_bytes"]) == (True, 0)


def test_of_two_micro_batches_only_the_one_that_was_looked_for_is_told(capsys):
    """Half of the batch is advice where no size is known; here one more than half may fit."""
    _, printed = fit(capsys, "trained", "--device-memory", "8MiB", "--device", "cpu", "--json")
    found = json.loads(printed.out)
    assert found["advice"]
    assert not [each for each in found["advice"] if "micro-batches" in each["what"]]
    _, printed = fit(capsys, "trained", "--device-memory", "8MiB", "--device", "cpu")
    size = found["micro_batch"]["size"]
    assert f"tenure.adaptive.step(fn, batch, maximum={size})." in " ".join(printed.out.split())


@pytest.mark.slow
def test_a_pipe_that_knows_no_blocks_changes_no_exit_code():
    done = run_program(
        "import os, runpy, sys\n"
        f"os.chdir({os.getcwd()!r})\n"
        "sys.path.insert(0, '')\n"
        "sys.stdout.reconfigure(encoding='ascii')\n"
        "sys.argv = ['tenure', 'fit', 'program:setup', '--device-memory', '1GiB']\n"
        "runpy.run_module('tenure', run_name='__main__')\n"
    )
    assert done.returncode == 0, done.stderr
    assert "It fits in 1.0 GiB" in done.stdout


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--help"])
    text = capsys.readouterr().out
    assert "Exit code: 0 if the step fits" in text


def test_an_unknown_device_is_a_mistake_told_in_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        fit(capsys, "setup", "--device-memory", "1GiB", "--device", "rtx")
    printed = capsys.readouterr()
    assert "'rtx' is no device of torch; write cuda, cuda:1" in printed.err
    assert "Traceback" not in printed.err


def test_a_function_that_wants_arguments_is_named_with_them(capsys):
    code, printed = fit(capsys, "wants_a_size", "--device-memory", "1GiB")
    assert (code, printed.out) == (2, "")
    told = "program.py:wants_a_size is called without arguments: missing a required argument: "
    assert f"{told}'n_rows'. Name a function" in printed.err
    assert "Traceback" not in printed.err


def test_advice_for_a_device_that_is_not_here_warns_of_nothing(capsys):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        code, printed = fit(capsys, "trained", "--device-memory", "1MiB")
    assert (code, told) == (1, [])
    assert "\n    " in printed.out
