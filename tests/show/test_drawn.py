"""The parts of a drawn page, before any browser: data that nothing breaks out of; colours."""

import base64
import hashlib
from itertools import chain

import pytest

from tenure.profiler import DeviceReport, MemReport

from .drawn_samples import HOSTILE, hostile_page, sample_page
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


def texts_in(value):
    """All keys and values of text."""
    if isinstance(value, str):
        yield value
    parts = chain(value, value.values()) if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            yield from texts_in(part)


def test_a_name_is_in_the_data_as_it_is_shown_wherever_it_stands():
    text = hostile_page()
    # a name that is no text has no other spelling in a file
    text.encode()
    found = [*texts_in(read_data(text))]
    assert all(each.replace("\n", "").isprintable() for each in found)
    # a device, a category, a scope, three in its row at the peak, a span and a mark
    assert [found.count(shown) for shown in HOSTILE.values()] == [8] * len(HOSTILE)


def test_a_name_has_its_colour_and_others_take_the_next():
    data = read_data(sample_page())
    named, others = data["named"], data["others"]
    parts = {"gradients": 3 << 20, "b": 2 << 20, "a": 1 << 20}
    report = MemReport((DeviceReport("cpu", (), parts, sum(parts.values())),))
    shown = report._repr_html_()
    for name, colour in (("gradients", named["gradients"]), ("b", others[0]), ("a", others[1])):
        assert f'<span style="color: {colour}; text-decoration-color: {colour}">{name}' in shown
    assert len(set(others)) == 24
