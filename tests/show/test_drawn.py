"""What a drawn page is made of, before any browser: data that nothing breaks out of."""

import base64
import hashlib
import random

import pytest

from tenure._show import drawn_page
from tenure._visible import visible

from .drawn_samples import HOSTILE, LEVELS, device, hostile_page, row, sample_page, timeline
from .pages import assert_stands_alone, read_data, read_html


@pytest.mark.parametrize("text", [sample_page(), hostile_page()], ids=["sample", "hostile"])
def test_a_drawn_page_stands_alone(text):
    assert_stands_alone(text, is_drawn=True)
    tags, _ = read_html(text)
    assert [tag for tag, _ in tags].count("script") == 2


def test_only_its_own_script_may_run():
    text = sample_page()
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    tags, _ = read_html(text)
    assert policy in [attributes.get("content") for _, attributes in tags]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_in_the_data_as_it_is_shown(name):
    text = drawn_page("", timeline(device(category={name: LEVELS})), "")
    assert [*read_data(text)["devices"][0]["by_category"]] == [visible(name.expandtabs())]
    # a name that is no text has no other spelling in a file
    text.encode()


def test_a_name_that_the_script_draws_hides_nothing_and_turns_nothing_around():
    name = "\u202eevil\u200b\x1b\U000e0041"
    drawn = timeline(
        device(name=name, scope={name: LEVELS}, at_peak=[row(name, name, [f"\tx = 1{name}"], 1)]),
        spans=[(name, 0, 0, 1)],
        marks=[(0.5, name)],
    )
    data = str(read_data(drawn_page("", drawn, "")))
    assert data.isprintable()
    assert data.count("evil") == 7
    assert "        x = 1" in data


def test_a_page_without_scripts_shows_its_report():
    tags, text = read_html(sample_page())
    assert "noscript" in [tag for tag, _ in tags]
    assert "Charts need JavaScript" in text
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
    assert len(drawn_page("", timeline(*devices, spans=spans), "").encode()) < 10_000_000
