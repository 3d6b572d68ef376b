"""Each wait of training is needed: without any one of them, a program is caught."""

import pytest
import torch

from tenure.paging._device._copies import Copies
from tenure.paging._link import _link
from tenure.paging._training import _homeward
from tenure.testing import RaceError, Rates

from .blocks import inputs

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")


def steps(sim, pair):
    """Steps, a forward that no backward pass follows, and a gradient that is added to."""
    sim(rates=Rates(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9))
    both = pair()
    optimizers = {m: torch.optim.SGD(m.parameters(), 0.1) for m in (both.host, both.there)}

    def run(model, x):
        model(x).sum().backward()
        model(x).sum().backward()
        model(x)
        optimizers[model].step()
        optimizers[model].zero_grad()

    with both.page():
        for x in inputs(sim, 3):
            both.run(lambda model, x=x: run(model, x))
            assert both.values_differ() == []
    sim.finish()


@pytest.mark.exhaustive
def test_the_program_as_written_is_clean(sim, pair):
    steps(sim, pair)


def without_after(link, pairs, after):
    return _plain_page_out(link, pairs, [])


_plain_page_out = _link.Link.page_out
BROKEN = {
    "the host for a gradient": (_homeward.Homeward, "wait", lambda *_: None),
    "a gradient's copy for its kernels": (_link.Link, "page_out", without_after),
    "an optimizer for copies": (Copies, "wait_for_all_copies", lambda _: None),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", BROKEN)
def test_without_one_wait_the_program_is_caught(sim, pair, monkeypatch, what):
    monkeypatch.setattr(*BROKEN[what])
    with pytest.raises((RaceError, AssertionError)):
        steps(sim, pair)
    sim.take_faults()


@pytest.mark.exhaustive
def test_memory_of_a_gradient_goes_to_its_stream_after_its_copy(sim, pair, monkeypatch):
    let_arrive, n_seen = _homeward.Homeward._let_arrive, []

    def watched(self, unit):
        sent = list(self._under_way[unit])
        let_arrive(self, unit)
        assert all(each.stream.ready_s >= each.event.at_s for each in sent)
        n_seen.append(len(self._under_way))

    monkeypatch.setattr(_homeward.Homeward, "_let_arrive", watched)
    steps(sim, pair)
    assert max(n_seen) == 1
