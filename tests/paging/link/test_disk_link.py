"""From files to the simulated device, through staging memory that is used over and over."""

import inspect
import os
import threading
from functools import partial

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, PagingWarning, load_paged, page
from tenure.paging._host._reader import Reader
from tenure.paging._link import _file_link
from tenure.paging._link._file_link import FileLink
from tenure.testing import RaceError
from tenure.testing._device._host_memory import pinned_memory

from ..models import WIDTH, mlp
from ..test_zoo import assert_equal
from .test_disk_zoo import home, saved

N_BYTES = 1000


class Content:
    """What a link reads: numbered bytes, or an error."""

    def __init__(self, first, n_bytes=N_BYTES, error=None, gate=None):
        self.first, self.n_bytes, self.error, self.gate = first, n_bytes, error, gate

    def __getitem__(self, where):
        low, high, _ = where.indices(self.n_bytes)
        return Content(self.first + low, high - low, self.error, self.gate)

    def read_into(self, target):
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        target.copy_(self.values())

    def values(self):
        return (torch.arange(self.first, self.first + self.n_bytes) % 251).to(torch.uint8)


@pytest.fixture
def link(sim):
    reader = Reader()
    link = FileLink(sim.device, reader, N_BYTES, slot_bytes=64)
    yield link
    link.finish()
    link.close()
    reader.close()


def on_device(sim, n_bytes=N_BYTES):
    return torch.empty(n_bytes, dtype=torch.uint8, device=sim.device)


def test_a_copy_larger_than_the_staging_memory_arrives_whole(sim, link):
    to, source = on_device(sim), Content(5)
    assert link.staging_bytes < N_BYTES
    _, ready = link.page_in([(to, source)], [link.mark(link.current())])
    link.let_compute(link.current(), ready)
    assert_equal(to.cpu(), source.values())


def test_copies_arrive_whichever_is_waited_for_first(sim, link):
    sources = [Content(100 * number, 10 + 50 * number) for number in range(8)]
    places = [on_device(sim, source.n_bytes) for source in sources]
    after = [link.mark(link.current())]
    ready = [link.page_in([pair], after)[1] for pair in zip(places, sources, strict=True)]
    for number in (5, 0, 7, 1):
        link.let_compute(link.current(), ready[number])
        assert_equal(places[number].cpu(), sources[number].values())


def test_asking_for_a_copy_does_not_wait_for_its_file(sim, link):
    gate, to = threading.Event(), on_device(sim)
    source = Content(0, gate=gate)
    before, ready = link.page_in([(to, source)], [link.mark(link.current())])
    gate.set()
    link.let_compute(link.current(), ready)
    assert_equal(to.cpu(), source.values())
    assert before.elapsed_time(ready) > 0


def test_an_error_of_a_read_is_raised_where_the_copy_is_used_and_later_copies_arrive(sim, link):
    to, after = on_device(sim), [link.mark(link.current())]
    _, broken = link.page_in([(to, Content(0, error=PagingError("broken")))], after)
    _, fine = link.page_in([(to, Content(3))], after)
    with pytest.raises(PagingError, match="broken"):
        link.let_compute(link.current(), broken)
    with pytest.raises(PagingError, match="broken"):
        link.check(broken)
    link.let_host(broken)
    link.let_compute(link.current(), fine)
    assert_equal(to.cpu(), Content(3).values())


def test_finishing_launches_all_that_was_asked_for(sim, link):
    places = [on_device(sim) for _ in range(3)]
    after = [link.mark(link.current())]
    for number, place in enumerate(places):
        link.page_in([(place, Content(number))], after)
    link.finish()
    for number, place in enumerate(places):
        assert_equal(place.cpu(), Content(number).values())


def test_staging_memory_is_pinned_while_it_is_needed(sim):
    reader = Reader()
    link = FileLink(sim.device, reader, N_BYTES, slot_bytes=64)
    slots = link._staging
    assert all(slot.is_pinned() for slot in slots)
    link.close()
    assert not any(slot.is_pinned() for slot in slots)


@torch.no_grad()
def test_a_model_passes_through_staging_memory_smaller_than_its_units(sim, tmp_path, monkeypatch):
    monkeypatch.setattr("tenure.paging._resources.FileLink", partial(FileLink, slot_bytes=512))
    model, x = mlp(), torch.ones(4, WIDTH)
    expected = home(model.to(sim.device)(x.to(sim.device)))
    model = model.cpu()
    sim()
    with load_paged(
        model, saved(model, tmp_path / "m.safetensors"), sim.device, budget="10KiB"
    ) as h:
        for _ in range(3):
            assert_equal(home(model(x)), expected)
        report = h.report()
        assert (report.staging_bytes, report.host_bytes) == (4 * 512, 0)


@torch.no_grad()
def test_statistics_that_a_pass_changes_are_home_before_the_file_is_read_again(sim, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(8)])
    plain = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(8)]).to(sim.device)
    x = torch.randn(4, WIDTH)
    with page(model, sim.device, budget="3KiB", host=tmp_path) as handle:
        assert any(not unit.resident for unit in handle.plan.units)
        for _ in range(3):
            assert_equal(home(model(x)), home(plain(x.to(sim.device))))
    assert_equal(model.state_dict(), home(plain.state_dict()))


def uses_each_slot_again(sim):
    reader = Reader()
    link = FileLink(sim.device, reader, N_BYTES, slot_bytes=64)
    to = on_device(sim).zero_()
    for first in (9, 10):
        source = Content(first)
        _, ready = link.page_in([(to, source)], [link.mark(link.current())])
        link.let_compute(link.current(), ready)
        read = to.clone()
        ready.synchronize()
        assert_equal(read.cpu(), source.values())
    to.add_(1)
    host = torch.zeros(N_BYTES, dtype=torch.uint8).pin_memory()
    link.page_out([(host, to)], [link.mark(link.current())])
    assert bytes(host.numpy()) == bytes((Content(10).values() + 1).numpy())
    link.finish()
    sim.finish()
    link.close()
    reader.close()


def test_a_link_that_waits_is_clean(sim):
    uses_each_slot_again(sim)


@pytest.mark.parametrize(
    ("wait", "without"),
    [
        ("self._in.wait_event(event)", "pass"),
        ("self.let_host(copied)", "pass"),
        ("self._out.wait_event(event)", "pass"),
        ("stream.wait_event(event.inner if isinstance(event, FileEvent) else event)", "pass"),
    ],
)
def test_without_one_wait_it_is_caught(sim, monkeypatch, wait, without):
    source = inspect.getsource(_file_link)
    assert source.count(wait) == 1
    mutant = dict(vars(_file_link))
    exec(compile(source.replace(wait, without), _file_link.__file__, "exec"), mutant)
    monkeypatch.setitem(globals(), "FileLink", mutant["FileLink"])
    with pytest.raises((RaceError, AssertionError)):
        uses_each_slot_again(sim)
    sim.take_faults()


def test_staging_memory_that_can_not_be_pinned_is_used_with_one_warning(sim, tmp_path):
    sim(fail_pinning="all")
    with pytest.warns(PagingWarning, match="could not be pinned .the driver says 2") as caught:
        handle = page(mlp(), sim.device, budget="12KiB", host=tmp_path)
    assert [each.filename for each in caught] == [__file__]
    handle.unpage()


def test_a_device_without_room_leaves_nothing_pinned_nor_open(sim, tmp_path):
    model, x = mlp(), torch.ones(1, WIDTH)
    expected, path = model(x), saved(model, tmp_path / "m.safetensors")
    sim(budget="4KiB")
    before = len(os.listdir("/proc/self/fd")), len(pinned_memory._ranges)
    with pytest.raises(torch.OutOfMemoryError):
        load_paged(model, path, sim.device, budget="12KiB")
    with pytest.raises(torch.OutOfMemoryError):
        page(model, sim.device, budget="12KiB", host=tmp_path)
    assert (len(os.listdir("/proc/self/fd")), len(pinned_memory._ranges)) == before
    assert_equal(model(x), expected)
