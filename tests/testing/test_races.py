"""Two uses of the same bytes, one of which writes, are a race where nothing orders them."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tenure.testing import RaceError

N_BYTES = 100


def launch(sim, stream, memory, kind):
    with sim.module.stream(stream):
        sim.launch_kernel(0.0, **{kind: [memory]})


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [("writes", "reads", "RAW"), ("reads", "writes", "WAR"), ("writes", "writes", "WAW")],
)
def test_uses_of_which_one_writes_need_an_order(sim, first, second, kind):
    x = torch.empty(N_BYTES, dtype=torch.uint8, device=sim.device)
    home, side = sim.module.current_stream(), sim.module.Stream()
    side.wait_stream(home)
    launch(sim, home, x, first)
    launch(sim, side, x[:0], second)
    told = (
        rf"^{kind}: stream {side.stream_id} {second} bytes 9 to 10 of a tensor that stream 0 "
        rf"{first}, and no wait orders the two \(a kernel .* after a kernel .*\)\. Make the later"
    )
    with pytest.raises(RaceError, match=told):
        launch(sim, side, x[9:10], second)
    assert len(sim.take_faults()) == 1
    side.wait_stream(home)
    launch(sim, side, x, second)
    home.wait_stream(side)


def test_a_detector_that_is_off_finds_nothing(sim):
    sim(detect_races=False)
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    launch(sim, side, x, "writes")
    del x
    assert sim.faults == []


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reads", "writes", "wait"]),
        st.integers(0, 2),
        st.integers(0, 60),
        st.integers(1, 10),
    ),
    max_size=25,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
# a read stands for no write, nor for the read of another stream
@example([("writes", 0, 0, 5), ("wait", 1, 0, 1), ("reads", 1, 0, 5), ("reads", 2, 0, 5)])
@example([("reads", 0, 0, 5), ("reads", 1, 0, 5), ("wait", 2, 1, 1), ("writes", 2, 0, 5)])
def test_forgetting_covered_accesses_loses_no_race(sim, actions):
    sim()
    x = torch.empty(N_BYTES, dtype=torch.uint8, device=sim.device)
    streams = [sim.module.current_stream(), sim.module.Stream(), sim.module.Stream()]
    clocks, uses = [[0] * 3 for _ in streams], []
    for kind, mine, low, length in actions:
        if kind == "wait":
            streams[mine].wait_stream(streams[low % 3])
            clocks[mine] = list(map(max, clocks[mine], clocks[low % 3]))
            continue
        part, span = x[low : low + length], range(low, low + length)
        clocks[mine][mine] += 1
        is_race = any(
            "writes" in (kind, other) and set(span) & set(bytes_) and clocks[mine][theirs] < tick
            for other, theirs, tick, bytes_ in uses
        )
        if is_race:
            with pytest.raises(RaceError, match="no wait orders the two"):
                launch(sim, streams[mine], part, kind)
            break
        launch(sim, streams[mine], part, kind)
        uses.append((kind, mine, clocks[mine][mine], span))
    sim.module.synchronize()
    sim.take_faults()


def test_a_race_names_both_operators(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    match = r"orders the two \(aten::exp_? after aten::fill_\)\. Make the later stream wait"
    with sim.module.stream(side), pytest.raises(RaceError, match=match):
        x.exp()
    assert len(sim.take_faults()) == 1
