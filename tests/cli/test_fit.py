"""`tenure fit` says whether work fits, by its text, its JSON, its page and its exit code."""

import json
import sys
import warnings

import pytest
import torch

from tenure.adaptive import Advice, PeakReport
from tests.programs import main

PROGRAM = """
import copy

import torch
from torch import nn


class Output:
    def __init__(self, loss):
        self.loss = loss


def model():
    layers = nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)
    return nn.Sequential(*map(copy.deepcopy, layers))


def loss_of(net):
    return lambda x: net(x).square().mean()


def batch(n=16):
    # few samples: if not even one fits, all are predicted one by one
    return torch.randn(n, 32, 256)


def setup():
    return loss_of(model()), batch()


def trained():
    net = model()
    return loss_of(net), batch(), torch.optim.SGD(net.parameters())


def on_meta():
    with torch.device("meta"):
        return loss_of(nn.Linear(2**18, 2**18)), torch.zeros(2, 2**18)


def moved():
    device = torch.device("cuda")
    net = nn.Linear(2**18, 2**18).cuda().to("cuda:0").to(device)
    return loss_of(net.to(torch.bfloat16)), torch.zeros(2, 2**18, device=device).bfloat16()


def needs_data():
    return loss_of(nn.Linear(int(torch.ones(7).sum().numpy()), 2)), torch.zeros(4, 7)


def talks():
    print("hello")
    return setup()


def has_a_loss():
    loss = loss_of(model())
    return lambda x: Output(loss(x)), batch()


def wants_a_size(n_rows, *others, scale=1):
    return setup()


def runs_backward(returned=lambda loss: loss):
    loss_of_batch, x, sgd = trained()

    def train_step(x):
        sgd.zero_grad()
        loss = loss_of_batch(x)
        loss.backward()
        sgd.step()
        return returned(loss)

    return train_step, x


def runs_backward_and_detaches():
    return runs_backward(torch.Tensor.detach)


def two_inputs_and_losses():
    net = model()

    def fn(b):
        return (net(b["x"]).mean(1) - b["y"][0]).square().mean(1), net[0].weight.sum()

    return fn, {"x": batch(), "y": [torch.zeros(16, 256), 3]}


def cached(width=700, rows=5_000):
    def fn(batch):
        with torch.no_grad():
            return sum(part.exp().exp().sum() for part in batch)

    return fn, [torch.randn(6_000, 700), torch.randn(rows, width)]


def cached_samples():
    return cached(500, 6_000)


def one_sample():
    return loss_of(model()), batch(1)


def uneven():
    net = model()
    return lambda b: net(b[0]).mean() + b[1].sum(), (torch.randn(8, 256), torch.randn(3))


def normed():
    return loss_of(nn.Sequential(nn.BatchNorm1d(32), *model())), batch()


def infers():
    net = model()

    @torch.no_grad()
    def fn(x):
        return net(net(net(x)))

    return fn, torch.zeros(16, 256, 256)


def returns_three():
    return 3


def returns_a_list_of_an_optimizer():
    return (model(), torch.zeros(2, 256), "sgd")


def raises():
    raise ZeroDivisionError("nobody\\nhome")


def leaves():
    raise SystemExit(0)


def fails_in_the_step():
    return lambda x: {}[x], "label"


class Holder:
    setup = staticmethod(setup)
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
TOLD = (
    Advice("use checkpoints", f"checkpoint({'block, ' * 11}f())", 6 * 2**20, 2**20),
    Advice("compute in " + "many words " * 9, "now()", 2**20, 6, changes_numbers=True),
    Advice("wish", "wish()", 2**30, -1),
)
_ADVICE = PeakReport.advice


@pytest.fixture(autouse=True)
def asked(tmp_path, monkeypatch):
    """The reports that were asked for advice, which takes most of the time and is `TOLD` here."""
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # a machine with an accelerator compares with what is free there
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = []
    monkeypatch.setattr(PeakReport, "advice", property(lambda report: asked.append(1) or TOLD))
    yield asked
    sys.modules.pop("program", None)


def fit(capsys, function, memory, *arguments, device="cpu"):
    words = ("--device-memory", memory, "--device", device, *arguments)
    code = main(["fit", f"program.py:{function}", *words])
    return code, capsys.readouterr()


def answered(capsys, function, memory, device="cpu"):
    """The exit code, and what the JSON says, with nothing beside it."""
    code, printed = fit(capsys, function, memory, "--json", device=device)
    assert printed.err == ""
    return code, json.loads(printed.out)


def test_what_fits_ends_with_0_and_says_how_much_is_left(capsys, asked):
    code, printed = fit(capsys, "setup", "1GiB")
    lines = printed.out.splitlines()
    assert code == 0
    assert lines[0].startswith("It fits in 1.0 GiB: ")
    assert lines[0].endswith(" MiB to spare.")
    assert lines[1].startswith("A step takes ")
    assert "(program.py:" in " ".join(lines[1:3])
    assert any(line.startswith("category") for line in lines)
    assert any(line.split()[:3] == ["budget", "1.0", "GiB"] for line in lines)
    assert printed.err == ""
    assert asked == []


def test_what_does_not_fit_ends_with_1_and_names_the_micro_batch_that_does(capsys):
    code, found = answered(capsys, "trained", "8MiB")
    smaller = found["micro_batch"]
    assert code == 1
    assert found["fits"] is False
    assert found["spare_bytes"] == 8 * 2**20 - found["report"]["needed_bytes"] < 0
    assert smaller["fits"]
    assert 1 < smaller["size"] < smaller["batch"] == 16
    assert smaller["needed_bytes"] <= 8 * 2**20
    # the gradients of one micro-batch are beside the next
    assert smaller["needed_bytes"] > 4 * 2**20
    code, printed = fit(capsys, "trained", "8MiB")
    told = " ".join(printed.out.split())
    assert (
        f"The largest micro-batch that fits is {smaller['size']}; the batch has 16 samples; in "
        f"micro-batches of {smaller['size']} the step takes "
    ) in told
    assert f"tenure.adaptive.step(fn, batch, maximum={smaller['size']})." in told


@pytest.mark.parametrize(
    ("function", "memory", "fn"),
    [
        ("has_a_loss", "8.5MiB", "lambda batch: fn(batch).loss"),
        ("two_inputs_and_losses", "8.5MiB", "fn"),
        ("normed", "8.5MiB", "fn"),
        ("infers", "20MiB", "fn"),
    ],
)
def test_whatever_a_step_takes_and_returns_is_split(function, memory, fn, capsys):
    code, found = answered(capsys, function, memory)
    smaller = found["micro_batch"]
    assert (code, smaller["fits"], smaller["batch"], smaller["fn"]) == (1, True, 16, fn)
    assert 1 < smaller["size"] < 16


def test_where_no_micro_batch_fits_it_says_so_and_tells_advice(capsys):
    code, printed = fit(capsys, "setup", "1KiB")
    assert code == 1
    assert "\nNo micro-batch fits: in micro-batches of 1 the step takes " in printed.out
    assert printed.out.endswith(ADVICE)


@pytest.mark.parametrize("function", ["one_sample", "uneven"])
def test_a_batch_that_can_not_be_split_has_no_micro_batch(function, capsys):
    code, printed = fit(capsys, function, "24B")
    assert code == 1
    assert "micro-batch" not in printed.out


def test_advice_is_for_a_device_that_is_not_here_and_has_no_other_micro_batch(capsys, monkeypatch):
    """Half of the batch is advice where no size is known; here the size was looked for."""
    monkeypatch.setattr(PeakReport, "advice", _ADVICE)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code, found = answered(capsys, "trained", "1MiB", device="cuda")
    assert (code, warned) == (1, [])
    assert found["advice"]
    for each in found["advice"]:
        assert each.keys() == {"what", "how", "peak_bytes", "saves_bytes", "changes_numbers"}
        assert "micro-batches" not in each["what"]


def test_on_an_accelerator_what_its_allocator_needs_is_compared(capsys):
    _, found = answered(capsys, "trained", "1GiB", device="cuda")
    report = found["report"]
    assert report["needed_bytes"] > report["peak_bytes"]
    code, found = answered(capsys, "trained", f"{report['peak_bytes']}B", device="cuda")
    smaller = found["micro_batch"]
    # what cuBLAS keeps does not become less
    assert (code, smaller["fits"]) == (1, False)
    assert smaller["needed_bytes"] > report["peak_bytes"]


def test_what_fits_once_a_cache_is_given_back_has_nothing_to_spare(capsys):
    _, found = answered(capsys, "cached", "1GiB", device="cuda")
    needed_bytes = found["report"]["needed_bytes"]
    code, found = answered(capsys, "cached", f"{needed_bytes - 2**21}B", device="cuda")
    assert (code, found["fits"], found["spare_bytes"]) == (0, True, 0)
    _, found = answered(capsys, "cached_samples", "64MiB", device="cuda")
    smaller = found["micro_batch"]
    assert smaller["fits"]
    assert smaller["needed_bytes"] > 64 << 20
    _, printed = fit(capsys, "cached_samples", "64MiB", device="cuda")
    assert (
        f"in micro-batches of {smaller['size']} the step fits in 64.0 MiB once the allocator gives "
        "back what it caches: with more memory it would keep "
    ) in " ".join(printed.out.split())


@pytest.mark.parametrize(
    "target", ["program:talks", "program:Holder.setup", "program.py:runs_backward_and_detaches"]
)
def test_without_a_known_memory_it_reports_alone(target, capsys):
    assert main(["fit", target, "--json"]) == 0
    printed = capsys.readouterr()
    # JSON is all that is printed, and reads back
    found = json.loads(printed.out)
    assert printed.err == ("hello\n" if "talks" in target else "")
    assert (found["fits"], found["budget_bytes"], found["spare_bytes"]) == (None, None, None)
    report = PeakReport.from_dict(found["report"])
    assert report.peak_bytes == found["report"]["peak_bytes"]


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
    assert main(["fit", "program:setup"]) == 0
    assert asked == [torch.device("cpu")]
    assert capsys.readouterr().out.startswith("It fits in 10.0 GiB: ")


@pytest.mark.parametrize(
    ("function", "parameter_bytes"),
    [("moved", 2 * (2**36 + 2**18)), ("on_meta", 4 * (2**36 + 2**18))],
)
def test_a_model_larger_than_the_machine_needs_neither_memory_nor_its_device(
    function, parameter_bytes, capsys
):
    code, found = answered(capsys, function, "80GiB")
    assert code == 1
    assert found["report"]["device"] == "cpu"
    assert found["report"]["categories"]["parameters"] == parameter_bytes


def test_a_function_that_needs_data_runs_as_it_is_and_that_is_told(capsys):
    code, printed = fit(capsys, "needs_data", "1MiB")
    assert code == 0
    assert printed.err.startswith(
        "program.py:needs_data fails on tensors without data (RuntimeError: .numpy() is not "
    )
    assert printed.err.endswith("): now it runs as it is, in memory.\n")


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("program.py", "'program.py' names no function. Write MODULE:FUNCTION, as train.py:setup."),
        ("gone.py:setup", "There is no file 'gone.py'. Give the path of a Python file."),
        ("gone:setup", "There is no module 'gone'. It is looked for in this directory and among "),
        ("json.py:setup", "'json.py' has the name of another module, "),
        ("program:seput", "program has no function 'seput'. Is it defined there?"),
        (
            "program:wants_a_size",
            "program:wants_a_size is called without arguments: missing a required argument: "
            "'n_rows'. Name a function",
        ),
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
def test_a_mistake_is_told_in_one_line(target, complaint, tmp_path, capsys):
    (tmp_path / "json.py").write_text(PROGRAM, "utf-8")
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
    code, printed = fit(capsys, function, "1GiB")
    lines = printed.err.splitlines()
    assert code == 2
    assert lines[-1] == f"tenure fit: error: program.py:{function} raised {complaint}"
    first = next(line for line in lines if line.startswith("  File "))
    assert "program.py" in first
