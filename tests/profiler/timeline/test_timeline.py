"""A recording: peaks to the byte, what storages count as, and where they were made."""

import base64
import gc
import json
import os
import pickle
import re
import sys
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tenure import NewDisposeScope
from tenure.adaptive import memory_budget
from tenure.profiler import ProfilerUsageError, Recording, Timeline
from tests.programs import run_program
from tests.threads import on_thread
from tests.true_peak import true_peak_bytes

from .programs import CASES, training

KIB = 1024


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_sums(report):
    for device in report.devices:
        assert len(device.times_s) == len(device.live_bytes)
        assert list(device.times_s) == sorted(set(device.times_s))
        for division in (device.by_category, device.by_scope, device.by_line):
            assert [sum(at) for at in zip(*division.values(), strict=True)] == [*device.live_bytes]
            assert all(n_bytes >= 0 for series in division.values() for n_bytes in series)
        assert sum(row.n_bytes for row in device.at_peak) == device.peak_bytes
        assert device.peak_bytes == max(device.live_bytes)
        assert device.live_bytes[device.times_s.index(device.peak_at_s)] == device.peak_bytes


@contextmanager
def recorded():
    """A timeline that misses nothing, and whose divisions add up."""
    with Timeline() as timeline:
        yield timeline
    assert timeline.report.notes == ()
    check_sums(timeline.report)


def at_peak(report, category=None):
    rows = report.devices[0].at_peak
    return sum(row.n_bytes for row in rows if category in (None, row.category))


def kib(n):
    return torch.ones(n * KIB, dtype=torch.uint8)


# --- peaks are the allocator's


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_training_step_is_that_of_the_allocator(name):
    plain = training(name)()
    truth = true_peak_bytes(training(name))
    train = training(name)
    with recorded() as timeline:
        seen = train()
    # a recording changes no weight
    assert all(map(torch.equal, plain, seen))
    host = timeline.report.devices[0]
    assert host.peak_bytes - host.live_bytes[0] == truth


@pytest.mark.parametrize("name", ["GPT", "checkpoints"])
def test_the_peak_of_an_accelerator_is_that_of_its_allocator(sim, name):
    train = training(name, device="sim")
    torch.sim.reset_peak_memory_stats()
    with recorded() as timeline:
        train()
    device = next(each for each in timeline.report.devices if each.device == "sim:0")
    assert device.peak_bytes == torch.sim.max_memory_allocated()
    known = sum(row.n_bytes for row in device.at_peak if row.n_storages)
    assert known > 0.9 * device.peak_bytes


# --- what storages count as


def test_a_storage_that_the_backward_pass_lets_go_was_saved_for_it_all_its_life():
    w = torch.ones(64 * KIB, requires_grad=True)
    with recorded() as timeline:
        w.exp().sum().backward()
    host = timeline.report.devices[0]
    assert max(host.by_category["saved for backward"]) == 256 * KIB
    assert max(host.by_category["gradients"]) == 256 * KIB


def test_parameters_and_state_that_are_gone_at_the_end_are_known_by_the_first_step():
    def train():
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()

    data = torch.utils.data.TensorDataset(torch.ones(8, 256))
    with Timeline() as timeline:
        train()
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4):
            batch.sum()
    host = timeline.report.devices[0]
    assert max(host.by_category["inputs"]) >= 4 * KIB
    assert max(host.by_category["parameters"]) == 16 * KIB
    # two moments of each weight and a count of steps
    assert max(host.by_category["optimizer state"]) == 2 * 16 * KIB + 4
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()
    assert not [each for each in hooks if each.__qualname__.startswith("Timeline")]


def test_a_scope_for_each_step_and_an_error_in_each_take_bounded_memory():
    with memory_budget("64KiB"), Timeline() as timeline:
        for i in range(220):
            with NewDisposeScope(f"step {i}"):
                kib(1)
                with pytest.raises(torch.OutOfMemoryError):
                    kib(100 + i)
    report = timeline.report
    names = {span.name for span in report.scopes}
    assert names == {f"step {i}" for i in range(220)}
    sizes = [int(re.search(r"allocate (\d+)", oom.text)[1]) for oom in report.ooms]
    assert sizes == [*range(100, 300)]
    assert "memory ran out more than 200 times: the first are marked" in report.notes


def test_what_is_alive_at_the_beginning_is_counted_from_there():
    kept = kib(300)
    with Timeline() as timeline:
        del kept
        torch.ones(1)
    host = timeline.report.devices[0]
    assert host.live_bytes[0] - host.live_bytes[-1] == 300 * KIB
    assert max(host.by_line["before the recording"]) >= 300 * KIB


FILLS = [lambda t: torch.ones(64 * KIB, dtype=t.dtype, out=t), lambda t: t.resize_(64 * KIB)]


@pytest.mark.parametrize("fill", FILLS)
def test_a_storage_that_an_operation_fills_has_the_size_that_it_got_there(fill):
    with Timeline() as timeline:
        out = torch.empty(0, dtype=torch.uint8)
        fill(out)
    rows = timeline.report.devices[0].at_peak
    # other tests may have left a tensor
    rows = [row for row in rows if row.n_storages and not row.was_before]
    assert [(row.n_bytes, row.n_storages) for row in rows] == [(64 * KIB, 1)]
    del out


def test_a_storage_that_no_operation_resizes_is_followed_and_stays_what_it_is():
    """As sharded models do it: the storage of a parameter is empty while nobody uses it."""
    model = nn.Linear(64, 64, bias=False)
    storage = model.weight.untyped_storage()
    with recorded() as timeline:
        storage.resize_(0)
        torch.ones(1)
        storage.resize_(16 * KIB)
        torch.ones(1)
    parameters = timeline.report.devices[0].by_category["parameters"]
    assert parameters[0] == parameters[-1] == 16 * KIB
    assert 0 in parameters


def test_memory_of_numpy_is_in_no_figure_and_a_copy_of_it_is_an_input():
    numpy = pytest.importorskip("numpy")
    with recorded() as timeline:
        x = torch.from_numpy(numpy.ones(100 * KIB, dtype="uint8"))
        y = x.to(torch.int16)
    host = timeline.report.devices[0]
    assert host.peak_bytes - host.live_bytes[0] == y.nbytes
    assert at_peak(timeline.report, "inputs") >= y.nbytes
    del x


# --- where they were made


def test_the_band_of_a_scope_begins_and_ends_with_it():
    with Timeline() as timeline:
        with NewDisposeScope("outer"):
            kept = [kib(100)]
            with NewDisposeScope("inner"):
                kept.append(kib(200))
            kept.append(kib(50))
        torch.ones(1)
    report = timeline.report
    outer, inner = report.scopes
    assert (outer.name, outer.depth, inner.name, inner.depth) == ("outer", 0, "inner", 1)
    assert outer.begin_s < inner.begin_s < inner.end_s < outer.end_s <= report.duration_s
    host = report.devices[0]
    for name, span, n_bytes in (("outer", outer, 150), ("inner", inner, 200)):
        series = host.by_scope[name]
        seen = [t for t, n in zip(host.times_s, series, strict=True) if n]
        assert span.begin_s <= min(seen)
        assert max(seen) <= span.end_s
        assert max(series) == n_bytes * KIB
    assert host.by_scope["outer"][-1] == host.by_scope["inner"][-1] == 0


# --- beside other things


@pytest.mark.parametrize("is_below", [False, True])
def test_an_error_of_memory_is_marked_once_where_it_was(is_below):
    timeline, budget = Timeline(), memory_budget("1MiB")
    with ExitStack() as blocks:
        for block in (budget, timeline) if is_below else (timeline, budget):
            blocks.enter_context(block)
        kept = kib(900)
        with pytest.raises(torch.OutOfMemoryError):
            kib(500)
    (oom,) = timeline.report.ooms
    assert oom.text.startswith("cpu out of memory. Tried to allocate 500.0 KiB")
    assert 0 < oom.at_s <= timeline.report.duration_s
    assert kept.numel()


@pytest.mark.sim_allocator("exact")
def test_an_error_of_an_accelerator_is_marked(sim):
    sim(budget="1MiB")
    with Timeline() as timeline:
        kept = torch.ones(700 * KIB, dtype=torch.uint8, device="sim")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(700 * KIB, dtype=torch.uint8, device="sim")
    assert len(timeline.report.ooms) == 1
    assert kept.numel()


def test_no_tensor_is_kept_alive_and_no_random_number_is_drawn():
    before = torch.get_rng_state()
    with Timeline() as timeline:
        x = torch.ones(10)
        alive = weakref.ref(x)
        del x
        assert alive() is None
    assert torch.equal(torch.get_rng_state(), before)
    gone = weakref.ref(timeline)
    del timeline
    gc.collect()
    assert gone() is None


def test_a_profiler_of_torch_inside_sees_its_own_and_a_note_says_what_is_missed():
    with Timeline() as timeline:
        with profile(profile_memory=True) as profiler:
            torch.ones(1000)
        torch.ones(1000)
    assert any(each.key == "aten::ones" for each in profiler.key_averages())
    assert any("temporaries inside operations" in note for note in timeline.report.notes)
    check_sums(timeline.report)


def test_what_other_threads_make_is_in_the_level_though_nobody_says_what_it_is():
    with recorded() as timeline:
        torch.ones(1)
        kept = on_thread(kib, 800)
        torch.ones(1)
    host = timeline.report.devices[0]
    assert host.live_bytes[-1] >= host.live_bytes[0] + kept.nbytes


def test_in_a_generator_that_is_closed_late_the_modes_of_others_stay():
    def generate():
        with Timeline() as timeline:
            yield timeline
            torch.ones(1)

    running = generate()
    timeline = next(running)
    with memory_budget("1GiB") as budget:
        kept = torch.ones(10)
        running.close()
        more = torch.ones(10)
        assert budget.live_bytes == 80
    assert timeline.report.notes == ()
    assert kept.numel() + more.numel() == 20
    assert _len_torch_dispatch_stack() == 0


def test_compiled_code_runs_compiled_and_its_memory_is_in_the_level():
    @torch.compile(backend="aot_eager")
    def double(x):
        return (x * 2).sin()

    x = torch.ones(256 * KIB, requires_grad=True)
    expected = double(x)
    with recorded() as timeline:
        y = double(x)
        z = y.sum()
        z.backward()
    assert torch.equal(y, expected)
    host = timeline.report.devices[0]
    assert host.peak_bytes - host.live_bytes[0] >= 2 * 1024 * KIB


# --- its life


def test_a_timeline_is_used_once_and_its_report_waits_for_the_end():
    timeline = Timeline()
    with pytest.raises(ProfilerUsageError, match="no report yet"):
        timeline.report  # noqa: B018
    with timeline, pytest.raises(ProfilerUsageError, match="entered a second time"):
        timeline.__enter__()
    with pytest.raises(ProfilerUsageError, match="entered a second time"):
        timeline.__enter__()


def test_the_end_on_another_thread_is_refused_and_changes_nothing():
    told = "closed from thread 'other', and stays open"
    with Timeline() as timeline:
        with pytest.raises(ProfilerUsageError, match=told):
            on_thread(timeline.__exit__, None, None, None)
        kept = kib(300)
    assert at_peak(timeline.report) >= 300 * KIB
    assert kept.numel()


@pytest.mark.slow
def test_a_long_run_is_thinned_and_its_peak_is_exact():
    # more lives than are searched at once, and many times as many moments as are kept
    with recorded() as timeline:
        kept = [torch.ones(10 + i) for i in range(400)]
        for i in range(25_000):
            kept[i * 7 % 400] = torch.ones(10 + i % 400)
            if i == 20_000:
                large = torch.ones(100_000)
                del large
        for _ in range(28_000):
            torch.ones(5)
    host = timeline.report.devices[0]
    assert 500 < len(host.times_s) <= 2048
    assert timeline.report.n_events > 100_000
    row = host.at_peak[0]
    assert (row.n_bytes, row.n_storages) == (400_000, 1)
    # all that was alive at the peak is known by its line
    assert sum(row.n_bytes for row in host.at_peak if not row.n_storages) < 10_000
    assert max(host.by_category["other tensors"]) >= 400_000


def test_many_long_lives_leave_fewer_moments_and_the_peak(monkeypatch):
    # private names, because a million long lives take minutes
    series = "tenure.profiler._timeline._series"
    for name, value in (("_FIRST_LOOK", 200), ("_MOST_LIVES", 500), ("_FEWEST_MOMENTS", 8)):
        monkeypatch.setattr(f"{series}.{name}", value)
    with recorded() as timeline:
        kept = [torch.ones(10 + i) for i in range(400)]
        for i in range(1000):
            kept[i % 400] = torch.ones(10 + (i * 7) % 400) * 2
        large = torch.ones(100_000)
        del large
        for _ in range(500):
            torch.ones(5)
    host = timeline.report.devices[0]
    assert len(host.times_s) <= 64
    row = host.at_peak[0]
    assert (row.n_bytes, row.n_storages) == (400_000, 1)
    assert max(host.by_category["temporary or unexplained"]) < 10_000


def test_many_short_scopes_leave_the_longest():
    with Timeline() as timeline, NewDisposeScope("whole"):
        for _ in range(5000):
            with NewDisposeScope("short"):
                pass
    names = [span.name for span in timeline.report.scopes]
    assert names.count("whole") == 1
    assert 2000 < len(names) <= 4096
    assert f"{5001 - len(names)} short scopes are left out" in timeline.report.notes


# --- a process that ends, or forks, inside of its block


@pytest.mark.slow
def test_an_interpreter_that_ends_inside_a_block_ends_well_and_has_not_imported_the_compiler():
    done = run_program(
        "import sys, torch\nfrom tenure.profiler import Timeline\n"
        "timeline = Timeline().__enter__()\ntorch.ones(1) + 1\n"
        "assert 'torch._dynamo' not in sys.modules\n",
        hides=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKS = """
import os
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from tenure.profiler import ProfilerUsageError, Timeline

# a child of a process whose OpenMP has run waits for ever for threads that it has not
torch.set_num_threads(1)

def train():
    model = torch.nn.Linear(64, 64)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    return model.weight.sum().item()

plain, child = train(), None
with Timeline() as alone:
    kept = torch.ones(1000)
del kept
with Timeline() as timeline:
    kept = torch.ones(1000)
    child = os.fork()
    if child == 0:
        assert _len_torch_dispatch_stack() == 0
        assert train() == plain
        kept = None
if child == 0:
    print("child", repr(timeline))
    try:
        timeline.export("run.html")
    except ProfilerUsageError as error:
        print("child", error)
    with Timeline() as own:
        train()
    print("child", own.report.n_events > 0, flush=True)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for each in (alone, timeline):
    print("parent", each.report.n_events, each.report.devices[0].peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_child_that_is_forked_in_a_block_runs_plainly_and_leaves_the_recording(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = run_program(FORKS, hides=True)
    assert (done.returncode, done.stderr) == (0, "")
    *child, alone, parent = done.stdout.splitlines()
    assert alone == parent
    assert child[0] == "child <Timeline, left to the parent process>"
    assert "has no report here: this process was forked in its block" in child[1]
    assert child[2:] == ["child True"]
    assert [*tmp_path.iterdir()] == []


# --- files are read by the tools that they are for


@pytest.fixture(scope="module")
def report():
    with Timeline() as timeline, NewDisposeScope("training"):
        training("GPT")()
    return timeline.report


@pytest.mark.slow
def test_torchs_own_viewer_draws_it(report, tmp_path):
    path, drawn = report.export(tmp_path / "run.pickle"), tmp_path / "run.html"
    done = run_program("-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(drawn))
    assert done.returncode == 0, done.stderr
    (data,) = re.findall(r'"base64": "([^"]*)"', drawn.read_text())
    assert pickle.loads(base64.b64decode(data)) == pickle.loads(path.read_bytes())


def test_tenure_reads_the_peak_and_its_lines_in_it(report, tmp_path):
    (track,) = Recording.load(report.export(tmp_path / "run.pickle")).tracks
    assert track.device == "cpu"
    assert track.peak_bytes == report.devices[0].peak_bytes
    assert sum(row.n_bytes for row in track.at_peak) == track.peak_bytes
    assert any("programs.py" in row.stack[-1] for row in track.at_peak)


def test_counters_stand_at_the_times_of_torch_profilers_own_file(tmp_path):
    with profile() as profiler, torch.profiler.record_function("whole"), Timeline() as timeline:
        torch.ones(10) + 1
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours = json.loads(timeline.export(tmp_path / "ours.json").read_text())
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    (whole,) = (
        each
        for each in theirs["traceEvents"]
        if each.get("name") == "whole" and each.get("ph") == "X" and "cat" in each
        if each["cat"] == "user_annotation"
    )
    times = [each["ts"] for each in ours["traceEvents"] if each["ph"] == "C"]
    assert times
    assert whole["ts"] <= min(times) <= max(times) <= whole["ts"] + whole["dur"]


def test_counters_add_up_and_scopes_are_spans(report, tmp_path):
    events = json.loads(report.export(tmp_path / "run.json").read_text())["traceEvents"]
    counters = [each for each in events if each["ph"] == "C" and "cpu" in each["name"]]
    assert max(sum(each["args"].values()) for each in counters) == report.devices[0].peak_bytes
    assert [each["name"] for each in events if each["ph"] == "X"] == ["training"]


def test_a_speedscope_profile_weighs_the_stacks_at_the_peak(report, tmp_path):
    data = json.loads(report.export(tmp_path / "run.speedscope.json").read_text())
    (shown,) = data["profiles"]
    assert sum(shown["weights"]) == shown["endValue"] == report.devices[0].peak_bytes
    frames = [each["name"] for each in data["shared"]["frames"]]
    assert all(0 <= i < len(frames) for sample in shown["samples"] for i in sample)
    assert any("programs.py" in name for name in frames)


def test_an_ending_that_nobody_knows_is_refused_with_those_that_there_are(report, tmp_path):
    for end in ("xyz", "csv"):
        told = rf"'run.{end}'.* nothing was written.*\.html.*\.json"
        with pytest.raises(ProfilerUsageError, match=told):
            report.export(tmp_path / f"run.{end}")
    assert list(tmp_path.iterdir()) == []
