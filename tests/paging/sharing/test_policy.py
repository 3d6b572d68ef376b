"""The policy, tried on devices made of numbers."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tenure.paging._sharing._policy import (
    PATIENCE,
    Ceiling,
    Demand,
    keeps,
    lowered,
    margin_bytes,
    offered,
)

SIZES = st.integers(0, 1000)


def ceilings(first_bytes, rooms):
    """The ceilings of passes that have room for so much."""
    ceiling, found = Ceiling(first_bytes), []
    for n_bytes in rooms:
        ceiling = offered(ceiling, n_bytes)
        found.append(ceiling)
    return found


@given(first=SIZES, rooms=st.lists(SIZES, max_size=60))
def test_weights_never_have_more_than_the_last_pass_had_room_for(first, rooms):
    for n_bytes, ceiling in zip(rooms, ceilings(first, rooms), strict=True):
        assert ceiling.n_bytes <= n_bytes


@given(first=SIZES, rooms=st.lists(SIZES, max_size=60))
def test_it_goes_up_only_where_several_passes_in_a_row_have_had_room(first, rooms):
    found = [Ceiling(first), *ceilings(first, rooms)]
    for i, (before, after) in enumerate(pairwise(found)):
        if after.n_bytes > before.n_bytes:
            assert i + 1 >= before.patience >= PATIENCE
            assert min(rooms[i + 1 - before.patience : i + 1]) >= after.n_bytes


@given(low=st.integers(100, 500), high=st.integers(600, 1000), period=st.integers(1, 12))
def test_where_room_comes_and_goes_it_moves_ever_more_seldom(low, high, period):
    rooms = [low if i // period % 2 else high for i in range(300)]
    ups = [
        i
        for i, (before, after) in enumerate(pairwise(ceilings(low, rooms)))
        if after.n_bytes > before.n_bytes
    ]
    assert len(ups) <= 8


@given(first=SIZES, rooms=st.lists(SIZES, max_size=40), left=st.integers(0, 1000))
def test_where_room_stays_it_is_taken_in_the_end_up_to_a_small_step(first, rooms, left):
    *_, last = [Ceiling(first), *ceilings(first, [*rooms, *[left] * 120])]
    assert left - left / 64 - 1 <= last.n_bytes <= left


@given(first=SIZES, rooms=st.lists(SIZES, max_size=40), held=SIZES, patience=st.integers(3, 20))
def test_what_was_given_back_in_the_middle_is_not_taken_again_at_once(first, rooms, held, patience):
    *_, before = [Ceiling(first), *ceilings(first, rooms)]
    after = lowered(before, held, patience)
    assert after.n_bytes == min(before.n_bytes, held)
    for _ in range(after.patience - 1):
        after = offered(after, 10_000)
        assert after.n_bytes == min(before.n_bytes, held)


def test_a_cache_that_grows_widens_the_margin_and_one_jump_does_not():
    assert margin_bytes(320, [900, 880, 860, 840]) == 40
    assert margin_bytes(320, [900, 900, 400, 400]) == 10
    assert margin_bytes(320, [900, 800, 900, 800, 900, 800]) == 10
    assert margin_bytes(320, []) == 10


@given(
    needs=st.lists(st.integers(0, 900), min_size=1, max_size=60),
    steps=st.lists(st.integers(-40, 30), max_size=60),
)
def test_on_a_device_what_grows_no_faster_than_the_margin_always_finds_room(needs, steps):
    total = 1000
    ceiling, need, seen = Ceiling(total * 3 // 4), 0, []
    for jump, step in zip(needs, [*steps, *[0] * len(needs)], strict=False):
        # Now and then it jumps, below what it was before; else it moves in small steps.
        need = min(jump, max(seen[-8:], default=0)) if jump % 7 == 0 else max(0, need + step)
        need = min(need, total)
        held = min(ceiling.n_bytes, total)
        if seen:
            assert held + need <= total or held == 0
        seen.append(need)
        room = total - max(seen[-8:])
        margin = margin_bytes(total, [total - each for each in seen[-8:]])
        ceiling = offered(ceiling, max(0, room - margin))


@st.composite
def rounds(draw):
    """Several models and a limit that has room for what each needs at the least."""
    demands = []
    for _ in range(draw(st.integers(1, 4))):
        least = draw(st.integers(1, 50))
        most = least + draw(st.integers(0, 500))
        demands.append(
            Demand(
                least_bytes=least,
                held_bytes=draw(st.integers(least, most)),
                most_bytes=most,
                hidden_bytes=draw(st.integers(0, 300)),
                turn=draw(st.none() | st.integers(1, 50)),
                n_turns_ago=draw(st.integers(0, 12)),
            )
        )
    limit = sum(each.least_bytes for each in demands) + draw(st.integers(0, 800))
    return demands, draw(st.integers(0, len(demands) - 1)), limit


@given(rounds())
def test_nobody_is_asked_for_what_it_needs_and_all_fit(drawn):
    demands, runs, limit = drawn
    found = keeps(demands, runs, limit)
    assert all(kept >= each.least_bytes for kept, each in zip(found, demands, strict=True))
    assert sum(found) <= limit
    assert found[runs] <= demands[runs].most_bytes


@given(rounds())
def test_a_model_that_is_alone_may_have_all_that_it_can_use(drawn):
    demands, _, limit = drawn
    (alone,) = keeps(demands[:1], 0, limit)
    assert alone == min(limit, demands[0].most_bytes)


def two(**known):
    each = Demand(least_bytes=10, held_bytes=55, most_bytes=110, **known)
    return [each, each]


def test_models_with_long_turns_take_all_from_each_other_and_those_with_short_ones_do_not():
    assert keeps(two(turn=5), 0, 120) == [110, 10]
    assert sum(keeps(two(turn=1), 0, 120)) == 120
    assert keeps(two(turn=1), 0, 120) == keeps(two(turn=1), 1, 120)
    assert keeps(two(), 1, 120) == [10, 110]


def test_memory_goes_where_it_hides_copies():
    link_bound, compute_bound = two(turn=1)
    compute_bound = replace(compute_bound, hidden_bytes=70)
    assert keeps([compute_bound, link_bound], 0, 120) == [40, 80]
    long_turns = replace(link_bound, turn=9)
    assert keeps([link_bound, long_turns], 0, 120) == [10, 110]


def test_a_model_that_was_not_used_for_long_is_not_waited_for():
    first, second = two(turn=1)
    gone = replace(first, turn=40, n_turns_ago=30)
    assert keeps([gone, second], 1, 120) == [10, 110]
