"""The parts of a drawn page, before any browser: data that nothing breaks out of; colours."""

import base64
import hashlib

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
def test_a_drawn_page_stands_alone_and_only_its_own_script_may_run(text):
    assert_stands_alone(text, is_drawn=True)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    tags, _ = read_html(text)
    assert [tag for tag, _ in tags].count("script") == 2
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
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


def test_a_name_has_its_colour_and_others_take_the_next():
    data = read_data(sample_page())
    named, others = data["named"], data["others"]
    parts = {"gradients": 3 << 20, "b": 2 << 20, "a": 1 << 20}
    report = MemReport((DeviceReport("cpu", (), parts, sum(parts.values())),))
    shown = report._repr_html_()
    for name, colour in (("gradients", named["gradients"]), ("b", others[0]), ("a", others[1])):
        assert f'<span style="color: {colour}; text-decoration-color: {colour}">{name}' in shown
    assert len(set(others)) == 24
