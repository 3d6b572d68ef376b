"""Each wait of the engine is needed: without any one of them, some program is caught."""

import ast
import copy
import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, page
from tenure.paging._device import _copies, _engine
from tenure.paging._handle import carry_out
from tenure.paging._host._host_buffers import HostBuffers
from tenure.paging._link import _link
from tenure.paging._planning._plan import make_plan
from tenure.paging._planning._residency import Residency
from tenure.testing import RaceError, Rates

from ..models import Beside, Side

WIDTH = 32
WAITING = {
    *("wait_event", "synchronize", "let_compute", "finish"),
    *("let_host", "let_host_look", "let_host_read"),
}
CLASSES = {_engine: _engine.Engine, _copies: _copies.Copies, _link: _link.Link}
EVENTS_OF_THE_PAST = {
    "self._fences.take(start, start + unit.n_bytes)": "[]",
    "self._copy_in(page.unit, pairs, self.marks_of(page))": "self._copy_in(page.unit, pairs, [])",
    "after = [*after, self._written.pop(unit)]": "self._written.pop(unit)",
    "self._link.page_out(pairs, self.marks_of(page))": "self._link.page_out(pairs, [])",
    "self._fences.add(0, n_bytes, self._link.mark(self._link.current()))": "pass",
    "0, place), [now])": "0, place), [])",
    "uses if written is None else [*uses, written]": "uses",
    "self._fences.add(page.start, end, event)": "pass",
    "for event in self._copies.uses_of(page)]": "for event in []]",
    "if page.unit in self._idle.free():": "if True:",
    "page.last_use = self._copies.marks_of(page)": "page.last_use = []",
    "page.waited.clear()\n\n": "pass\n\n",
    "page.waited.clear()\n        page.host": "page.host",
}


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
    sim(link=Rates(memory_bytes_per_s=1e9))
    model = linears()
    for ring_bytes, stays in ((9 << 10, False), (0, True)):
        torch.zeros(1 << 16, device=sim.device).add_(1)  # its memory may be what the pager gets
        busy_until_s = sim.module.current_stream().ready_s
        with through_ring(sim, model, ring_bytes, stays) as handle:
            engine = handle._pager.engine
            engine.acquire(model[5]._parameters._hosts["weight"].unit)
            assert all(each.ready.at_s > busy_until_s for each in engine._pages.values())


def writes_buffers_and_reads_them_again(sim):
    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(4, WIDTH, device=sim.device)
    for ring_bytes, stays, n_ahead in ((9 << 10, False, 0), (27 << 10, False, 1), (0, True, 0)):
        model.count.seen.zero_()
        with through_ring(sim, model, ring_bytes, stays, n_ahead), torch.no_grad():
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


def needs_more_at_once_than_passes(sim):
    sim(link=Rates(memory_bytes_per_s=1e9))
    torch.manual_seed(0)
    model, x = Early(), torch.randn(4, WIDTH, device=sim.device)
    planned = make_plan(model, sim.device, 1, "1MiB", ())
    resident = frozenset(planned.cut.units[2:])
    planned = replace(planned, division=Residency(resident, planned.cut.units[0].n_bytes))
    expected = copy.deepcopy(model).to(sim.device)(x).cpu()
    link = _link.Link(sim.device)
    with carry_out(model, planned, link, HostBuffers(sim.device, pin=True), 0):
        outputs = [model(x) for _ in range(3)]
    assert all(torch.equal(y.cpu(), expected) for y in outputs)


def through_ring(sim, model, ring_bytes, stays, n_ahead=0):
    planned = make_plan(model, sim.device, 1, "1MiB", ())
    resident = planned.division.resident if stays else frozenset()
    planned = replace(planned, division=Residency(resident, ring_bytes))
    link = _link.Link(sim.device)
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


def gives_memory_back(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    for n_passes in (0, 1):
        with page(model, sim.device, budget="20KiB") as handle:
            outputs = [model(x) for _ in range(n_passes)]
            assert handle._pager.engine.give_back(1) > 0
            assert all(torch.equal(model(x), output) for output in outputs)


def is_interrupted_while_it_drops_a_page(sim):
    model, x = linears(), torch.randn(4, WIDTH, device=sim.device)
    with through_ring(sim, model, 10 * 1024, stays=False) as handle:
        engine = handle._pager.engine
        # and no further
        engine._drop = lambda page: engine._idle.take(page) and engine._pages.pop(page.unit)
        with pytest.raises(PagingError, match="no room"):
            model(x)
        del engine._drop
        model(x)


def takes_a_state_dict_in_its_forward(sim):
    model, x = Saved().eval(), torch.randn(4, WIDTH, device=sim.device)
    with page(model, sim.device, budget="1MiB"):
        model(x)
    assert model.found == [WIDTH * WIDTH, 2 * WIDTH * WIDTH]


def reads_a_weight_on_a_second_stream(sim):
    sim(link=Rates(memory_bytes_per_s=1e8))
    model = nn.Sequential(*[Beside(Side(sim), joins=False) for _ in range(6)]).eval()
    with page(model, sim.device, budget="10KiB", prefetch=1):
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
    gives_memory_back,
    holds_what_it_has_read,
    needs_more_at_once_than_passes,
    is_interrupted_while_it_drops_a_page,
)


def run_all(sim, **options):
    for program in PROGRAMS:
        sim(**options)
        with torch.no_grad():
            program(sim)
        sim.finish()


def mutants():
    """Every source of the engine without one of its waits, with what is missing."""
    for module in CLASSES:
        source = inspect.getsource(module)
        for line in sorted(_lines_that_wait(source)):
            lines = source.splitlines()
            text = lines[line - 1]
            lines[line - 1] = text[: len(text) - len(text.lstrip())] + "pass"
            yield pytest.param(module, "\n".join(lines), id=f"{module.__name__}:{text.strip()}")
    sources = {module: inspect.getsource(module) for module in CLASSES}
    for text, without in EVENTS_OF_THE_PAST.items():
        [(module, source)] = [each for each in sources.items() if text in each[1]]
        assert source.count(text) == 1, text
        yield pytest.param(module, source.replace(text, without), id=text)


def _lines_that_wait(source):
    return {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in WAITING
    }


def test_the_programs_as_written_are_clean(sim):
    run_all(sim)


def test_the_programs_as_written_give_the_same_where_kernels_run_late(sim):
    run_all(sim, late_kernels=True, detect_races=False)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "source"), list(mutants()))
def test_without_one_wait_a_program_is_caught(sim, monkeypatch, module, source):
    mutant = dict(vars(module))
    exec(compile(source, module.__file__, "exec"), mutant)
    original = CLASSES[module]
    for name, function in vars(mutant[original.__name__]).items():
        if inspect.isfunction(function):
            monkeypatch.setattr(original, name, function)
    with pytest.raises((RaceError, AssertionError)):
        run_all(sim)
    sim.take_faults()
