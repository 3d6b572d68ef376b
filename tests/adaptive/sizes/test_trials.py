"""Sizes that a step tries out after it has failed, whatever part of the memory is fixed."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.adaptive._sizes._model import SizeModel

from .size_simulation import Device, Site
from .test_search import loads, measuring

MANY = settings(deadline=None, max_examples=150)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)
    yield
    logging.getLogger("tenure.adaptive").setLevel(logging.NOTSET)


@MANY
@given(loads(most=64.0, most_fixed=0.9))
def test_the_first_step_has_95_percent_after_three_failures_though_most_is_fixed(load):
    device, initial = load
    with measuring(device):
        site = Site(device, initial)
        first = site.step()
        assert device.n_ooms <= 3
        assert first >= 0.94 * min(initial, device.largest) - 1
        for _ in range(19):
            site.step()
    assert device.n_ooms <= 3


@MANY
@given(loads(most=16.0, most_fixed=0.9, powers=(1.0, 2.0)), st.randoms(use_true_random=False))
def test_memory_that_is_steeper_and_varies_fails_three_times_at_the_most(load, draw):
    device, initial = load
    device.vary = lambda: draw.uniform(-0.005, 0.005)
    with measuring(device):
        site = Site(device, initial)
        first = site.step()
    assert device.n_ooms <= 3
    assert first >= 0.8 * min(initial, device.largest) - 1


def test_what_failed_by_much_is_followed_by_an_eighth_and_the_line_that_shows():
    device = Device(free_bytes=10_050, piece_bytes=10, fixed_bytes=5000)
    with measuring(device):
        site = Site(device, 2000)
        site.step()
        site.step()
    # a quarter tells what is fixed
    assert site.sizes == [2000, 250, 62, 495, 495, 495]


def failed_at(size, limit_bytes, *, n_ooms=1):
    model = SizeModel(1, size, has_margin=True)
    model.limit_bytes = limit_bytes
    for _ in range(n_ooms):
        model.ran_out(size)
    return model


def test_one_size_that_needs_nearly_all_is_asked_at_a_quarter_what_of_it_is_fixed():
    model = failed_at(800, 1000)
    model.ran(100, 900)
    assert model.next_size() == 25
    model.ran(25, 885)
    assert model.next_size() > 390  # of 600 by the line


def test_a_size_that_was_to_fit_is_followed_by_a_careful_one_and_that_by_the_middle():
    model = failed_at(1000, 1000)
    model.ran(125, 125)
    assert model.next_size() == 562  # halfway: in proportion what failed was to fit
    model.ran_out(562)
    assert model.next_size() == 346  # if memory grows with the square of the size
    model.ran_out(346)
    assert model.next_size() == 235  # halfway again: less is free than it seems


@MANY
@given(
    st.integers(1, 10**4), st.floats(1.5, 8), st.integers(0, 10**9), st.sampled_from([1, 1.5, 2]),
    st.floats(1.1, 20),
)  # fmt: skip
def test_with_one_failure_left_the_next_fits_whatever_power_the_memory_grows_with(
    size, grown, fixed, power, room
):
    def needed(size):
        return math.ceil(fixed + 1000 * size**power)

    larger = int(size * grown) + 1
    limit_bytes = int(needed(larger) * room)
    model = failed_at(10**9, limit_bytes, n_ooms=2)
    model.ran(size, needed(size))
    model.ran(larger, needed(larger))
    found = model.next_size()
    # a size that is hardly larger is tried all the same
    least = max(larger + larger // 40, larger + 1)
    assert found is None or found <= least or needed(found) <= limit_bytes * 1.01


def test_no_more_than_eight_are_tried_out(monkeypatch):
    device = Device(free_bytes=10_000, piece_bytes=10)
    monkeypatch.setattr(
        SizeModel, "next_size", lambda self, is_trial=True: self.ok + 1 if is_trial else None
    )
    with measuring(device):
        site = Site(device, 1600)
        site.step()
    assert site.sizes == [1600, *range(200, 208), 207]
