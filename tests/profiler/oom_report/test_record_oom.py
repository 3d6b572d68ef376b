"""The recorder sees the first error, changes nothing, and says what it saw on one screen."""

import contextlib
import gc
import io
import json
import sys
import threading
import traceback

import pytest
import torch
from torch import nn
from torch.optim import sgd

from tenure.adaptive import OutOfRetriesError, memory_budget, step
from tenure.profiler import OomReport, ProfilerUsageError, record_oom
from tests.programs import run_program


@pytest.fixture
def recorder():
    with record_oom(quiet=True) as found:
        yield found


def pile_up(limit="1MiB"):
    kept, net = [], nn.Identity()
    with memory_budget(limit):
        while True:
            kept.append(net(torch.ones(64, 1024)))


@pytest.mark.slow
def test_an_error_that_the_program_handles_is_seen(recorder):
    with pytest.raises(torch.OutOfMemoryError):
        pile_up()
    report = recorder.report
    assert (report.cause, report.device, report.requested_bytes) == ("results", "cpu", 262_144)
    assert report.first_line == (
        "Results pile up: kept[…] keeps 4 tensors, 1.0 MiB. Use chunked(collect=)."
    )
    assert report.site.endswith("in pile_up")
    assert (report.total_bytes, report.free_bytes) == (1 << 20, 0)
    assert report.categories["other tensors"] >= 1 << 20


def test_the_error_goes_on_as_the_same_object(recorder):
    class Broken(nn.Module):
        def forward(self, x):
            raise error

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.utils.checkpoint.checkpoint(Broken(), torch.ones(1), use_reentrant=False)
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert not hasattr(error, "__notes__")
    # up to torch 2.12 the hooks of a checkpoint that raised stay on until its frames are cleared
    traceback.clear_frames(error.__traceback__)


@pytest.mark.slow
def test_an_error_in_a_backward_pass_and_one_in_a_step_are_seen():
    for place in ("backward", "step"):
        net = nn.Linear(256, 256)
        optimizer = torch.optim.Adam(net.parameters())
        with record_oom(quiet=True) as recorder:
            loss = net(torch.ones(2, 256)).sum()
            if place == "step":
                loss.backward()
            with memory_budget("128KiB"), pytest.raises(torch.OutOfMemoryError):
                loss.backward() if place == "backward" else optimizer.step()
        assert recorder.report is not None
        assert (recorder.report.cause == "optimizer_state") == (place == "step")


@pytest.mark.slow
def test_the_steps_of_an_optimizer_are_not_slowed_and_the_watch_goes_on(monkeypatch):
    def depth():
        return torch._C._len_torch_function_stack()

    depths, update = [], sgd.sgd

    def updating(*args, **kwargs):
        depths.append(depth())
        return update(*args, **kwargs)

    monkeypatch.setattr(sgd, "sgd", updating)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record_oom(quiet=True) as recorder:
        for _ in range(4):
            net(torch.ones(4)).sum().backward()
            optimizer.step()
        assert depths == [0, 0, 0, 0]
        optimizer.step(lambda: 0.0)
        assert depths[-1] == depth() == 1
        with pytest.raises(torch.OutOfMemoryError):
            pile_up()
    assert recorder.report is not None
    assert depth() == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_step_that_raises_and_is_handled_leaves_the_watch_on(is_kept):
    class Stubborn(torch.optim.SGD):
        fails = False

        def step(self):
            if self.fails:
                raise RuntimeError("no step")
            super().step()

    net = nn.Linear(4, 4)
    optimizer = Stubborn(net.parameters(), lr=0.1)
    errors = []
    with record_oom(quiet=True) as recorder:
        for i in range(5):
            optimizer.fails = i == 4
            net(torch.ones(4)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                errors += [error] * is_kept
        # an error that is kept has the arguments of the step, up to the next step
        optimizer.fails = False
        optimizer.step()
        with pytest.raises(torch.OutOfMemoryError):
            pile_up()
        assert recorder.report is not None
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.slow
def test_a_data_set_in_a_list_is_no_result_that_piles_up(recorder):
    samples = [torch.ones(1024) for _ in range(256)]
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    with memory_budget("2MiB"), pytest.raises(torch.OutOfMemoryError):
        net(torch.stack(samples).repeat(2, 1)).square().mean().backward()
    assert recorder.report.cause == "batch"
    assert "test_record_oom.py" in recorder.report.first_line


@pytest.mark.slow
@pytest.mark.parametrize("is_garbage", [True, False])
def test_tensors_from_before_a_budget_are_not_the_cause_of_its_error(recorder, is_garbage):
    # gradients that other tests left in cycles would tell of a training
    gc.collect()
    old = [torch.ones(256, 1024) for _ in range(4)]
    old.append(old)
    if is_garbage:
        del old
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            pile_up()
    finally:
        gc.enable()
    assert recorder.report.first_line.startswith("Results pile up: kept[…] keeps 4 tensors")
    assert recorder.report.categories["other tensors"] < 2 << 20


@pytest.mark.slow
def test_a_cache_that_is_joined_with_more_is_named_with_its_line(recorder):
    def generate():
        cache = torch.zeros(1, 1024)
        while True:
            cache = torch.cat([cache, torch.zeros(8, 1024)])

    with memory_budget("1MiB"), pytest.raises(torch.OutOfMemoryError):
        generate()
    report = recorder.report
    assert report.cause == "leak"
    assert report.first_line.startswith("Leak: cache grows by torch.cat at test_record_oom.py:")
    assert "Bound it" in report.first_line


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = self.c = self.d = self.e = torch.zeros(8, 1024)

    def forward(self, x):
        for name in "abcde":
            setattr(self, name, torch.cat([getattr(self, name), x]))
        return x


@pytest.mark.slow
def test_caches_of_many_layers_are_one_leak_though_each_is_small(recorder):
    layers = nn.ModuleList(Cached() for _ in range(2))

    def generate():
        while True:
            x = torch.zeros(8, 1024)
            for layer in layers:
                x = layer(x)

    with memory_budget("3MiB"), pytest.raises(torch.OutOfMemoryError):
        generate()
    report = recorder.report
    assert report.cause == "leak"
    assert report.first_line.startswith("Leak: Cached.a (and 9 others) grows by torch.cat at test_")
    assert len(report.first_line) <= 160


@pytest.mark.slow
def test_a_graph_that_a_variable_holds_over_the_next_forward_is_named(recorder):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def look():
        while True:
            # large beside what other tests have left
            looked_at = net(torch.ones(8192, 64))
            looked_at.sum()

    gc.collect()
    with memory_budget("24MiB"), pytest.raises(torch.OutOfMemoryError):
        look()
    assert recorder.report.first_line.startswith(
        "Leak: looked_at still holds the graph of the previous"
    )
    assert recorder.report.cause == "leak"


@pytest.mark.slow
def test_an_error_of_pythons_own_beside_a_small_model_has_no_known_cause():
    model = nn.Linear(32, 32)
    # what other tests left in cycles would be a cause
    gc.collect()
    with pytest.raises(MemoryError), record_oom(quiet=True) as recorder:
        raise MemoryError
    report = recorder.report
    assert (report.cause, report.cause_bytes) == ("unknown", 0)
    assert report.first_line == "Out of memory; too little was seen to tell why."
    assert report.categories["parameters"] >= model.weight.nbytes


@pytest.mark.slow
def test_memory_that_nothing_was_found_in_has_no_known_cause():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 20.00 GiB "
        "of which 0.50 GiB is free. Including non-PyTorch memory, this process has 19.50 GiB "
        "memory in use."
    )
    with pytest.raises(torch.OutOfMemoryError), record_oom(quiet=True) as recorder:
        raise error
    assert (recorder.report.cause, recorder.report.total_bytes) == ("unknown", 20 << 30)


def test_what_a_hook_keeps_beside_training_is_a_leak_and_no_result(recorder):
    kept = []
    net = nn.Linear(256, 256, bias=False)
    net.register_forward_hook(lambda module, inputs, out: kept.append(out.detach().clone()))
    optimizer = torch.optim.SGD(net.parameters())

    def train():
        while True:
            net(torch.ones(256, 256)).sum().backward()
            optimizer.step()

    with memory_budget("6MiB"), pytest.raises(torch.OutOfMemoryError):
        train()
    report = recorder.report
    assert report.cause == "leak"
    assert report.first_line.startswith("Leak: kept[…] keeps ")
    assert "remove the hook" in " ".join(report.evidence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "place"), [(("loss",), "history['loss'][…]"), (("loss", "out"), "history[…][…]")]
)
def test_the_key_is_named_under_which_all_of_it_is_kept(recorder, keys, place):
    net, history = nn.Linear(256, 256), {"loss": [], "out": [], "rate": []}

    def evaluate():
        while True:
            for key in keys:
                history[key].append(net(torch.ones(64, 256)).square().mean())
            history["rate"].append(0.1)

    with memory_budget("4MiB"), pytest.raises(torch.OutOfMemoryError):
        evaluate()
    assert recorder.report.first_line.startswith(f"Leak: {place} keeps ")


@pytest.mark.slow
def test_work_that_does_not_train_is_not_told_to_make_training_steps(recorder):
    q = torch.ones(64, 1024)
    with memory_budget("2MiB"), pytest.raises(torch.OutOfMemoryError):
        q.T @ q
    line = recorder.report.first_line
    assert line.startswith("Batch too large: test_record_oom.py:")
    assert line.endswith(": one tensor takes 4.0 MiB of 2.0 MiB. Use chunked().")
    assert not [each for each in recorder.report.evidence if "0 B" in each.split(".")[0]]


@pytest.mark.slow
def test_units_of_an_errors_text_are_those_of_allocators():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 GB. GPU 0 has a total capacity of 2.00 GB of "
        "which 0.50 GB is free."
    )
    with pytest.raises(torch.OutOfMemoryError), record_oom(quiet=True) as recorder:
        raise error
    assert (recorder.report.requested_bytes, recorder.report.total_bytes) == (1 << 30, 2 << 30)


def test_other_errors_are_no_news(recorder):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(ValueError, match="out of memory"):
        raise ValueError("out of memory")
    assert recorder.report is None
    assert repr(recorder).endswith("open>")


@pytest.mark.slow
def test_what_step_tries_again_is_no_news_and_what_it_gives_up_is():
    net = nn.Linear(64, 64)

    def loss_of(x):
        return net(x).square().sum()

    x = torch.ones(256, 64)
    with record_oom(quiet=True) as recorder, memory_budget("160KiB"):
        assert step(loss_of, x, loss="sum").attempts > 1
    assert recorder.report is None
    too_little = memory_budget("4KiB")
    with pytest.raises(OutOfRetriesError), record_oom(quiet=True) as recorder, too_little:
        step(loss_of, x, loss="sum")
    assert recorder.report is not None


def test_an_error_that_ends_the_block_is_explained():
    with pytest.raises(MemoryError), record_oom(quiet=True) as recorder:
        raise MemoryError
    assert recorder.report.device == "cpu"


@pytest.mark.slow
def test_a_second_error_that_is_handled_has_a_report_of_its_own(recorder):
    with pytest.raises(torch.OutOfMemoryError):
        pile_up()
    assert recorder.report.cause == "results"
    for _ in range(3):
        with memory_budget("1MiB"), pytest.raises(torch.OutOfMemoryError):
            torch.ones(1024, 1024)
    assert (recorder.report.cause, recorder.report.requested_bytes) == ("batch", 4 << 20)
    assert [each.cause for each in recorder.reports] == ["results", "batch"]
    with memory_budget("1MiB"), pytest.raises(torch.OutOfMemoryError):
        torch.ones(2048, 1024)
    assert recorder.report.requested_bytes == 8 << 20


def test_the_first_error_is_not_explained_again_where_it_ends_the_block_after_others():
    errors = []
    out_of_memory = pytest.raises(torch.OutOfMemoryError)
    with out_of_memory, record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        for n_mib in (64, 32):
            try:
                torch.empty(n_mib << 20, dtype=torch.uint8)
            except torch.OutOfMemoryError as error:
                errors.append(error)
        assert [each.requested_bytes >> 20 for each in recorder.reports] == [64, 32]
        raise errors[0]
    (report,) = recorder.reports
    assert report.requested_bytes == 64 << 20


class Shapeless(torch.Tensor):
    @property
    def shape(self):
        raise LookupError("nobody knows")


def test_an_operand_that_refuses_to_tell_its_shape_changes_no_error(recorder):
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2).as_subclass(Shapeless) + torch.ones(3)
    assert recorder.report is None


def test_an_error_with_the_text_of_an_earlier_one_is_explained_as_well():
    def first():
        torch.empty(64 << 20, dtype=torch.uint8)

    def second():
        torch.empty(64 << 20, dtype=torch.uint8)

    def both():
        with contextlib.suppress(torch.OutOfMemoryError):
            first()
        second()

    out_of_memory = pytest.raises(torch.OutOfMemoryError)
    with out_of_memory, record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        both()
    sites = [each.site for each in recorder.reports]
    assert [site.partition(" in ")[2].rpartition(".")[2] for site in sites] == ["first", "second"]


@pytest.mark.slow
def test_an_error_that_ends_the_program_is_explained_beside_the_first():
    done = run_program("""
import atexit, torch
from tenure.adaptive import memory_budget
from tenure.profiler import record_oom
recorder = record_oom()
atexit.register(lambda: print(len(recorder.reports), recorder.report.cause))
def work(n):
    parts = torch.ones(n, 1024)
    return parts * (parts + 1)
with memory_budget("6MiB"):
    try:
        work(1024)
    except RuntimeError:
        work(1000)
""")
    assert done.stdout == "2 traceback\n"
    assert done.returncode == 1
    first, second = (done.stderr.index(text) for text in ("Batch too large", "Kept exception"))
    assert first < second < done.stderr.index("Traceback (most recent call last)")


@pytest.mark.slow
def test_of_another_thread_what_nobody_handles_is_explained(monkeypatch):
    def work():
        raise MemoryError("no room")

    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with record_oom(quiet=True) as recorder:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(told) == 1
    assert recorder.report.error.startswith("MemoryError: no room")


def test_below_four_mib_of_memory_there_is_a_report_all_the_same():
    done = run_program("""
import atexit, json, resource, torch
from tenure.profiler import record_oom
recorder = record_oom()
kept = []
def main():
    while True:
        kept.append(torch.ones(1 << 18))
used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
report_of = lambda report: (report.cause, report.categories["other tensors"] >> 20)
atexit.register(lambda: print(*report_of(recorder.report)))
resource.setrlimit(resource.RLIMIT_DATA, (used + (60 << 20),) * 2)
main()
""")
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr
    cause, n_mib = done.stdout.split()
    assert cause == "leak"
    # beside these 60 the imports may have left free memory in the heap
    assert 50 <= int(n_mib) < 80


@pytest.mark.slow
def test_without_the_reserve_the_report_is_poorer_and_there(monkeypatch):
    def fail():
        raise MemoryError

    monkeypatch.setattr("tenure.profiler._oom_report._facts.take_census", fail)
    with record_oom(quiet=True) as recorder, pytest.raises(torch.OutOfMemoryError):
        pile_up()
    report = recorder.report
    assert report.notes == ("There was not enough memory left to look at the tensors.",)
    assert report.requested_bytes == 262_144
    assert report.site.endswith("in pile_up")


@pytest.mark.slow
def test_whatever_fails_in_the_recorder_the_error_is_the_programs(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    for name in ("judge", "build", "oom_info"):
        monkeypatch.setattr(f"tenure.profiler._oom_report._recorder.{name}", fail)
        with record_oom(quiet=True), pytest.raises(torch.OutOfMemoryError):
            pile_up()


def test_the_modes_of_others_stay_where_they_were():
    device = torch.device("meta")
    with device:
        recorder = record_oom(quiet=True)
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    with device:
        recorder.close()
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_a_default_device_that_comes_and_goes_meanwhile_is_not_disturbed():
    try:
        torch.set_default_device("meta")
        with record_oom(quiet=True):
            torch.set_default_device("cpu")
            torch.set_default_device("meta")
            torch.set_default_device(None)
            assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_hooks_are_put_back():
    hooks = sys.excepthook, threading.excepthook
    with record_oom(quiet=True) as recorder:
        assert sys.excepthook != hooks[0]
    assert (sys.excepthook, threading.excepthook) == hooks
    recorder.close()


def test_another_thread_may_not_close_it(recorder):
    errors = []

    def close():
        try:
            recorder.close()
        except ProfilerUsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert "was closed on another thread than it was opened on, and stays open." in errors[0]


@pytest.mark.slow
def test_the_report_fits_a_screen_and_is_written_and_read(recorder):
    with pytest.raises(torch.OutOfMemoryError):
        pile_up()
    report = recorder.report
    lines = str(report).split("\n")
    assert lines[0] == report.first_line
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    written = json.loads(json.dumps(report.to_dict()))
    assert written["format"] == "tenure.OomReport"
    assert OomReport.from_dict(written) == report


@pytest.mark.slow
def test_the_report_is_shown_once_on_stderr(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with record_oom():
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                pile_up()
    assert stream.getvalue().count("Results pile up") == 1


@pytest.mark.slow
def test_recording_keeps_no_tensor_alive(recorder):
    import gc
    import weakref

    references = []

    def work():
        x = torch.ones(8)
        references.append(weakref.ref(x))
        with memory_budget("1KiB"):
            torch.ones(1 << 20)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    del caught
    gc.collect()
    assert recorder.report is not None
    assert references[0]() is None


@pytest.mark.slow
def test_an_error_of_a_later_step_that_the_program_handles_is_seen(recorder):
    def train():
        net, history = nn.Linear(256, 256), []
        optimizer = torch.optim.Adam(net.parameters(), foreach=False)
        while True:
            loss = net(torch.ones(32, 256)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            history.append(loss)

    with memory_budget("6MiB"), pytest.raises(torch.OutOfMemoryError):
        train()
    assert recorder.report.site.endswith("in train")
    assert recorder.report.first_line.startswith("Leak: history[…] keeps ")
    assert recorder.report.first_line.endswith("Keep loss.item().")


def test_the_steps_of_optimizers_are_as_before_when_it_is_closed():
    (cell,) = torch.optim.SGD.step.__closure__
    before = cell.cell_contents
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters())
    with record_oom(quiet=True), record_oom(quiet=True):
        optimizer.step()
        assert cell.cell_contents is not before
    assert cell.cell_contents is before


@pytest.mark.slow
def test_an_error_that_python_keeps_for_debuggers_is_no_cause():
    program = """
import sys
import torch
from torch import nn
from tenure.adaptive import memory_budget
from tenure.profiler import record_oom

def pile_up():
    kept, net = [], nn.Identity()
    with memory_budget("1MiB"):
        while True:
            kept.append(net(torch.ones(64, 1024)))

def end(recorder):
    recorder._watch.set_aside()
    try:
        pile_up()
    except torch.OutOfMemoryError as error:
        # as Python sets it before it calls sys.excepthook
        sys.last_traceback = error.__traceback__
        raise

try:
    with record_oom(quiet=True) as recorder:
        end(recorder)
except torch.OutOfMemoryError:
    print(recorder.report.first_line)
"""
    # which names grow is read from all files of a program: of these tests they are too many
    told = run_program(program).stdout
    assert told.startswith("Results pile up: kept[…] keeps 4 tensors")
