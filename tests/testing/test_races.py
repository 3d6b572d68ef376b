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


def test_a_race_names_both_operators_and_a_detector_that_is_off_finds_none(sim):
    x, side = torch.ones(4, device=sim.device), sim.module.Stream()
    match = r"orders the two \(aten::exp_? after aten::fill_\)\. Make the later stream wait"
    with sim.module.stream(side), pytest.raises(RaceError, match=match):
        x.exp()
    assert len(sim.take_faults()) == 1
    sim(detect_races=False)
    x = torch.ones(4, device=sim.device)
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


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("end", ["freed", "emptied"])
def test_freeing_on_its_home_stream_what_a_side_stream_uses_is_caught(sim, end, records):
    side = sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    launch(sim, side, x, "writes")
    if records:
        x.record_stream(side)
    if end == "emptied":
        x.untyped_storage().resize_(0)
    del x
    faults = sim.take_faults()
    assert len(faults) == (not records)
    assert records or "a block of 3.91 KiB of stream 0 was freed while stream" in faults[0]


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_recorded_stream_waited_for_is_over_before_the_block_is_used_again(sim, waits):
    side, third = sim.module.Stream(), sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    x.record_stream(side)
    third.wait_stream(sim.module.current_stream())
    launch(sim, third, x, "writes")
    if waits:
        side.wait_stream(third)
    del x
    assert len(sim.take_faults()) == (not waits)


def pinned(*values):
    return torch.tensor(values).pin_memory()


@pytest.mark.parametrize("waits_elsewhere", [False, True])
def test_overwriting_the_source_of_a_copy_in_flight_is_caught(sim, waits_elsewhere):
    host = pinned(1.0, 2.0)
    device = host.to(sim.device, non_blocking=True)
    if waits_elsewhere:
        sim.module.Stream().synchronize()
    host.fill_(9)
    with pytest.raises(RaceError, match="host overwrite: pinned host memory was written while"):
        sim.module.synchronize()
    assert len(sim.take_faults()) == 1
    assert device.tolist() == [1, 2]


def test_the_target_of_a_copy_in_flight_has_poison_until_the_host_waits_for_it(sim):
    host, other = pinned(0.0, 0.0), pinned(3.0, 4.0)
    host.copy_(torch.tensor([1.0, 2.0], device=sim.device), non_blocking=True)
    there = other.to(sim.device, non_blocking=True)
    other.copy_(there, non_blocking=True)  # work that is ordered after it delivers nothing
    done = sim.module.current_stream().record_event()
    assert host.isnan().all()
    side = sim.module.Stream()
    with sim.module.stream(side), pytest.raises(RaceError, match="RAW"):
        host.to(sim.device, non_blocking=True)
    assert len(sim.take_faults()) == 1
    while not done.query():
        pass
    assert (host.tolist(), other.tolist()) == ([1, 2], [3, 4])
    sim(detect_races=False)
    host.copy_(torch.ones(2, device=sim.device), non_blocking=True)
    assert host.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_a_buffer_may_go_out_and_come_back_on_one_stream(sim, dtype):
    host = torch.tensor([1.0, 0.0]).to(dtype).pin_memory()
    device = host.to(sim.device, non_blocking=True)
    device.logical_not_()
    host.copy_(device, non_blocking=True)
    strided = torch.zeros(4, dtype=dtype).pin_memory()
    strided[::2].copy_(device, non_blocking=True)
    sim.module.synchronize()
    assert host.tolist() == [0, 1]
    assert strided.tolist() == [0, 0, 1, 0]
