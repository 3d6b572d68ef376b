"""The parts of a drawn page, before any browser: data that nothing breaks out of; colours."""

import base64
import hashlib
import itertools
import math
import random

import pytest

from tenure.profiler import DeviceReport, MemReport

from .drawn_samples import (
    HOSTILE,
    LEVELS,
    device,
    hostile_page,
    page_of,
    row,
    sample_page,
    timeline,
)
from .pages import assert_stands_alone, read_data, read_html


@pytest.mark.parametrize("text", [sample_page(), hostile_page()], ids=["sample", "hostile"])
def test_a_drawn_page_stands_alone(text):
    assert_stands_alone(text, is_drawn=True)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    tags, _ = read_html(text)
    assert [tag for tag, _ in tags].count("script") == 2


def test_a_page_is_readable_in_the_dark_and_on_paper():
    assert "@media (prefers-color-scheme: dark)" in sample_page()
    assert "@media print" in sample_page()


def test_only_its_own_script_may_run():
    text = sample_page()
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    tags, _ = read_html(text)
    assert policy in [attributes.get("content") for _, attributes in tags]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_in_the_data_as_it_is_shown(name):
    text = page_of(timeline(device(category={name: tuple(LEVELS)})))
    assert [*read_data(text)["devices"][0]["by_category"]] == [HOSTILE[name]]
    # a name that is no text has no other spelling in a file
    text.encode()


def test_a_name_that_the_script_draws_hides_nothing_and_turns_nothing_around():
    name = "\u202eevil\u200b\x1b\U000e0041"
    drawn = timeline(
        device(name=name, scope={name: LEVELS}, at_peak=[row(name, name, [f"\tx = 1{name}"], 1)]),
        spans=[(name, 0, 0, 1)],
        marks=[(0.5, name)],
    )
    data = str(read_data(page_of(drawn)))
    assert data.isprintable()
    assert data.count("evil") == 7
    assert "        x = 1" in data


def test_a_page_without_scripts_shows_its_report():
    tags, text = read_html(sample_page())
    assert "noscript" in [tag for tag, _ in tags]
    assert "Charts need JavaScript" in text
    assert text.count("python train.py") == 3
    assert "exit code 1" in text


def test_the_longest_recording_fits_into_a_page_of_10_mb():
    """A timeline has 2048 moments at the most, 4096 spans, 50 scopes, 20 lines, 500 places."""
    seeded = random.Random(0)

    def series(n):
        return {f"{i} {'n' * 60}": [seeded.randrange(80 << 30) for _ in times] for i in range(n)}

    times = sorted(seeded.random() * 1e4 for _ in range(2048))
    by = {"category": series(9), "scope": series(50), "line": series(20)}
    levels = [seeded.randrange(80 << 30) for _ in times]
    spans = [(f"scope {i % 50}", i % 5, t, t + 1) for i, t in enumerate(times * 2)]
    stacks = [[f"/home/someone/{k}/{i}.py:1 in {'f' * 40}" for k in range(40)] for i in range(500)]
    at_peak = [row("x", "", stack, 1, 1) for stack in stacks]
    devices = [device(times, levels, at_peak=at_peak, **by) for _ in range(3)]
    assert len(page_of(timeline(*devices, spans=spans)).encode()) < 10_000_000


# --- colours

# What is left of linear red, green and blue; Machado, Oliveira and Fernandes, 2009, severity 1.
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def _linear(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _oklab(linear):
    """Where distances are those that are seen; https://bottosson.github.io/posts/oklab/."""
    cones = _times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        [max(each, 0) for each in linear],
    )
    return _times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        [each ** (1 / 3) for each in cones],
    )


def _contrast(colour, other):
    weights = (0.2126, 0.7152, 0.0722)
    a, b = (sum(_times((weights,), _linear(each))) + 0.05 for each in (colour, other))
    return max(a, b) / min(a, b)


def _colours():
    """Those of categories, by name, and those that other names take."""
    data = read_data(sample_page())
    return data["named"], data["others"]


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_of_categories_differ_however_one_sees(sight):
    seen = {c: _oklab(_times(SIGHTS[sight], _linear(c))) for c in _colours()[0].values()}
    nearest = min(itertools.combinations(seen, 2), key=lambda pair: math.dist(*map(seen.get, pair)))
    assert math.dist(*map(seen.get, nearest)) > 0.1, nearest


@pytest.mark.parametrize("ground", ["#ffffff", "#16181b"])
def test_every_colour_is_seen_on_light_and_dark(ground):
    named, others = _colours()
    faint = {c for c in (*named.values(), *others) if _contrast(c, ground) < 1.5}
    assert faint == set()


def test_a_name_has_its_colour_and_others_take_the_next():
    named, others = _colours()
    parts = {"gradients": 3 << 20, "b": 2 << 20, "a": 1 << 20}
    report = MemReport((DeviceReport("cpu", (), parts, sum(parts.values())),))
    shown = report._repr_html_()
    for name, colour in (("gradients", named["gradients"]), ("b", others[0]), ("a", others[1])):
        assert f'<span style="color: {colour}; text-decoration-color: {colour}">{name}' in shown
    assert len(set(others)) == 24
