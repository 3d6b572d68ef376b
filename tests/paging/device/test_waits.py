"""Each wait of the engine is needed: without any one of them, some program is caught."""

import copy
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, _resources, page
from tenure.paging._device._engine import Engine
from tenure.paging._functions import carry_out
from tenure.paging._host._host_buffers import HostBuffers
from tenure.paging._link import _link
from tenure.paging._planning import arrange
from tenure.paging._planning._plan import make_plan
from tenure.testing import RaceError, Rates

from ..models import Beside, Side

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

WIDTH = 32


WAITERS = {
    *("fill", "refresh", "write_back", "let_compute", "page_in_use", "wait_for_copies"),
    *("let_host_look", "let_host_read", "save", "release", "take_back", "give_back", "close"),
    *("fill_residents", "reserve", "drop"),
}
"""The functions of the engine that tell one wait, or one event, from another."""
WAITS = [
    "fill for reserve, place",
    "fill for drop, place",
    "fill for release, place",
    "fill for write_back < release, place",
    "fill for write_back < release, source",
    "fill < fill_residents for fill_residents, place",
    "refresh for refresh, place",
    "refresh for release, place",
    "write_back < release for write_back < release",
    "write_back < save for write_back < save",
    "let_compute for fill",
    "let_compute for fill < fill_residents",
    "let_compute for refresh",
    "let_compute for write_back < release",
    "let_compute < page_in_use for fill",
    "let_compute < page_in_use for fill < fill_residents",
    "wait_for_copies for fill",
    "wait_for_copies for fill < fill_residents",
    "wait_for_copies for refresh",
    "let_host_look < let_host_read for write_back < release",
    "let_host_look < save for write_back < save",
    "take_back for all",
    "give_back for all",
    "close for all",
]
"""Who waits, for what, and for its place or its source where one event may stand for both."""
FREE_WAITS = [
    "let_compute for write_back < save",
    "let_compute < page_in_use for write_back < save",
    "let_host_look < let_host_read for write_back < save",
]
"""For what the host has waited for already: `save` returns when it is there."""


class DeafLink(_link.Link):
    """A link that leaves out every wait of one kind.

    Attributes:
        deaf_to: the kind; None to leave out nothing.
        asked: all kinds of waits that were asked for.
    """

    deaf_to = None
    asked: ClassVar[set[str]] = set()

    def __init__(self, device):
        super().__init__(device)
        self._made, self._written = {}, {}

    def mark(self, stream, *, timed=False):
        event = super().mark(stream, timed=timed)
        self._made[id(event)] = event, asking()
        return event

    def page_in(self, pairs, after):
        after = [event for event in after if self._hears(event, self._why(event, pairs))]
        return super().page_in(pairs, after)

    def page_out(self, pairs, after):
        event = super().page_out(pairs, [each for each in after if self._hears(each)])
        self._written[id(event)] = {to.data_ptr() for to, _ in pairs}
        return event

    def let_host(self, event):
        if self._hears(event):
            super().let_host(event)

    def finish(self):
        if self._hears(None):
            super().finish()

    def _let_wait(self, stream, event):
        if self._hears(event):
            super()._let_wait(stream, event)

    def _why(self, event, pairs):
        written = self._written.get(id(event), ())
        sources = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for _, each in pairs]
        is_source = any(address in source for address in written for source in sources)
        return ", source" if is_source else ", place"

    def _hears(self, event, why=""):
        kind = f"{asking()} for {self._made.get(id(event), (None, 'all'))[1]}{why}"
        self.asked.add(kind)
        return kind != self.deaf_to


def asking():
    """Who asks the link for something, the last function first."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if "_device" in frame.f_code.co_filename and name in WAITERS and name not in names:
            names.append(name)
        frame = frame.f_back
    return " < ".join(names)


def count_call(module, args, output):
    module.seen.add_(1)


class Written(nn.Module):
    """Writes a buffer and comes back to it, after others took its place."""

    def __init__(self):
        super().__init__()
        self.count = nn.Linear(WIDTH, WIDTH)
        self.count.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.count.register_forward_hook(count_call)
        self.others = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3)])

    def forward(self, x):
        for layer in self.others:
            x = self.count(layer(self.count(x))[:, :WIDTH])
        return x


class Saved(nn.Module):
    """Writes a buffer before and after it takes a state dict, which it reads at once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.found = []

    def forward(self, x):
        for _ in range(2):
            self.seen.add_(1)
            self.found.append(self.state_dict()["seen"].sum().item())
        return self.linear(x)


def linears():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).eval()


def streams_through_a_small_ring(sim):
    model, x = linears(), torch.randn(4, WIDTH)
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device)).cpu()
    weight_bytes = sum(p.nbytes for p in model.parameters())
    x = x.to(sim.device)
    with page(model, sim.device, budget=weight_bytes // 2):
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)


def is_unpaged_while_it_computes(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="15KiB"):
        model(x)


def takes_memory_after_what_used_it(sim):
    sim(rates=Rates(memory_bytes_per_s=1e9))
    model = linears()
    for ring_bytes, stays in ((9 << 10, False), (0, True)):
        torch.zeros(1 << 16, device=sim.device).add_(1)  # its memory may be what the pager gets
        busy_until_s = sim.module.current_stream().ready_s
        with through_ring(sim, model, ring_bytes, stays) as handle:
            engine = handle._pager.engine
            engine.acquire(model[5]._parameters._hosts["weight"].unit)
            assert all(each.ready.at_s > busy_until_s for each in engine.room.pages.values())


def writes_buffers_and_reads_them_again(sim):
    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(4, WIDTH, device=sim.device)
    for ring_kib, stays, n_ahead in ((9, False, 0), (27, False, 0), (27, False, 1), (0, True, 0)):
        model.count.seen.zero_()
        with through_ring(sim, model, ring_kib << 10, stays, n_ahead), torch.no_grad():
            for n_passes in (1, 2):
                model(x)
                assert model.count.seen.eq(6 * n_passes).all()


class Early(nn.Module):
    """Reads weights before the rest runs, and uses them after."""

    def __init__(self):
        super().__init__()
        self.layers, self.kept = linears(), []
        self.layers[0].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept.append(module.weight.detach())

    def forward(self, x):
        x = self.layers(x) @ self.kept.pop()
        weight = self.layers[1].weight.detach()
        x = self.layers[2:](x) @ weight
        del weight
        return self.layers[1:](x)


def holds_what_it_has_read(sim):
    torch.manual_seed(0)
    model, x = Early(), torch.randn(4, WIDTH, device=sim.device)
    expected = copy.deepcopy(model).to(sim.device)(x).cpu()
    for ring_kib in (9, 14):
        with through_ring(sim, model, ring_kib << 10, stays=False):
            outputs = [model(x) for _ in range(3)]
        assert all(torch.equal(y.cpu(), expected) for y in outputs)


def through_ring(sim, model, ring_bytes, stays, n_ahead=0):
    planned = make_plan(model, sim.device, 1, "1MiB", ())
    resident = planned.cut.units if stays else ()
    planned = replace(planned, arrangement=arrange(ring_bytes, (), resident, sim.device))
    link = DeafLink(sim.device)
    store = HostBuffers(sim.device, pin=True)
    return carry_out(model, planned, link, store, n_ahead)


def changes_weights_between_passes(sim):
    model, x = linears(), torch.randn(4, WIDTH)
    for budget in ("15KiB", "1MiB"):
        expected = []
        for _ in range(3):
            expected.append(copy.deepcopy(model)(x))
            for layer in model:
                layer.weight.data += 0.1
        for layer in model:
            layer.weight.data -= 0.3
        x_there = x.to(sim.device)
        with page(model, sim.device, budget=budget):
            found = []
            for _ in range(3):
                found.append(model(x_there))
                for layer in model:
                    layer.weight.data += 0.1
            torch.testing.assert_close([y.cpu() for y in found], expected)


def changes_a_weight_that_is_still_there(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="15KiB"):
        model(x)
        model[5].weight.data += 0.1
        model[5](x)


def gives_memory_back(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    for n_passes in (0, 1):
        with page(model, sim.device, budget="20KiB") as handle:
            outputs = [model(x) for _ in range(n_passes)]
            assert handle._pager.engine.room.give_back(1) > 0
            assert all(torch.equal(model(x), output) for output in outputs)


def is_interrupted_while_it_drops_a_page(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    with through_ring(sim, model, 10 * 1024, stays=False) as handle:
        room = handle._pager.engine.room
        # and no further
        room.drop = lambda page: room.idle.take(page) and room.pages.pop(page.unit)
        with pytest.raises(PagingError, match="no room"):
            model(x)
        del room.drop
        model(x)


def takes_a_state_dict_in_its_forward(sim):
    model, x = Saved().eval(), torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, "1MiB", budget="1MiB"):
        model(x)
    assert model.found == [WIDTH * WIDTH, 2 * WIDTH * WIDTH]


def reads_a_weight_on_a_second_stream(sim):
    sim(rates=Rates(memory_bytes_per_s=1e8))
    model = nn.Sequential(*[Beside(Side(sim), joins=False) for _ in range(6)]).eval()
    with page(model, sim.device, budget="14KiB", prefetch=1):
        for _ in range(3):
            model(torch.randn(4, WIDTH, device=sim.device))


PROGRAMS = (
    reads_a_weight_on_a_second_stream,
    takes_a_state_dict_in_its_forward,
    streams_through_a_small_ring,
    is_unpaged_while_it_computes,
    takes_memory_after_what_used_it,
    writes_buffers_and_reads_them_again,
    changes_weights_between_passes,
    changes_a_weight_that_is_still_there,
    gives_memory_back,
    holds_what_it_has_read,
    is_interrupted_while_it_drops_a_page,
)


def run_all(sim, **options):
    for program in PROGRAMS:
        sim(**options)
        with torch.no_grad():
            program(sim)
        sim.finish()


def test_the_programs_as_written_are_clean(sim):
    run_all(sim)


@pytest.fixture
def deaf(monkeypatch):
    """The class of the links that the programs get."""
    monkeypatch.setattr(_resources, "Link", DeafLink)
    monkeypatch.setattr(DeafLink, "asked", set())
    return DeafLink


def test_the_programs_ask_for_every_kind_of_wait(sim, deaf):
    run_all(sim)
    assert sorted(deaf.asked) == sorted([*WAITS, *FREE_WAITS])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
@pytest.mark.parametrize("kind", WAITS)
def test_without_one_wait_a_program_is_caught(sim, deaf, monkeypatch, kind):
    monkeypatch.setattr(deaf, "deaf_to", kind)
    with pytest.raises((RaceError, AssertionError)):
        run_all(sim)
    sim.take_faults()


@pytest.mark.slow
def test_an_event_from_before_the_last_use_is_caught(sim, monkeypatch):
    plain_release = Engine.release

    def release(engine, page):
        plain_release(engine, page)
        if not page.users and not page.is_resident:
            page.last_use = engine._copies.marks_of(page)  # also where something still holds it

    monkeypatch.setattr(Engine, "release", release)
    with pytest.raises((RaceError, AssertionError)):
        run_all(sim)
    sim.take_faults()
