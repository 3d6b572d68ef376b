"""Sizes that a step tries out after it has failed, whatever part of the memory is fixed."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.adaptive._sizes._limits import SizeLimits
from tenure.adaptive._sizes._record import Measured
from tenure.adaptive._sizes._trials import Trials, fitting

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
    # a quarter tells what is fixed, two lie between a line and a curve, three are a line
    assert site.sizes == [2000, 250, 62, 427, 495, 495, 495]


def test_one_size_that_needs_nearly_all_is_asked_at_a_quarter_what_of_it_is_fixed():
    trials = Trials(SizeLimits())
    assert trials.failed(800, 1000, 400, is_blind=True) == 100
    assert trials.tried(100, 900, 1000) == 25
    assert trials.tried(25, 885, 1000) > 390  # of 600 by the line


def test_a_size_that_was_to_fit_is_followed_by_the_middle_and_three_failures_by_what_is_sure():
    trials = Trials(SizeLimits())
    trials.failed(1000, 1000, 500, is_blind=True)
    assert trials.tried(125, 125, 1000) > 500
    assert trials.failed(594, 1000, 0, is_blind=False) == (125 + 594) // 2
    assert trials.tried(359, 600, 1000) == 503  # between a line and a curve
    careful = trials.failed(503, 1000, 0, is_blind=False)
    assert careful == 464  # by the curve alone, for three have failed
    assert trials.tried(careful, 999, 1000) is None


@MANY
@given(
    st.integers(1, 10**4), st.floats(1.5, 8), st.integers(0, 10**9), st.sampled_from([1, 1.5, 2]),
    st.floats(1.1, 20),
)  # fmt: skip
def test_what_is_careful_fits_whatever_power_the_memory_grows_with(size, grown, fixed, power, room):
    points = [
        Measured(n, math.ceil(fixed + 1000 * n**power)) for n in (size, int(size * grown) + 1)
    ]
    free_bytes = int(points[-1].n_bytes * room)
    found = fitting(points, free_bytes, is_careful=True)
    assert found >= points[-1].size
    # rounding up may be one byte in a thousand
    assert fixed + 1000 * found**power <= free_bytes * 1.01


def test_no_more_than_eight_are_tried_out():
    trials = Trials(SizeLimits())
    size, n_tried = trials.failed(10**9, 10**12, 1, is_blind=False), 0
    while size is not None:
        size, n_tried = trials.tried(size, 100 + n_tried, 10**12), n_tried + 1
    assert n_tried == 8
