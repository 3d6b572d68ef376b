"""What a drawn page is made of, before any browser: data that nothing breaks out of."""

import base64
import hashlib
import json
import random
import re

import pytest

from tenure._show import bands, drawn_page, flame, grid
from tenure._visible import visible

from .drawn_samples import HOSTILE, LEVELS, TIMES, chart, hostile_page, sample_page
from .pages import assert_stands_alone, read_html


def _data(text):
    (found,) = re.findall(r'<script [^>]*id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


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
    text = drawn_page("", [("", "", [chart(ways={"category": {name: LEVELS}})])])
    assert _data(text)["drawings"][0]["ways"][0]["bands"][0]["name"] == visible(name.expandtabs())
    # a name that is no text has no other spelling in a file
    text.encode()
    assert not {"<", ">", "&"} & set(text.split('id="data">')[1].split("</script>")[0])


def test_a_name_that_the_script_draws_hides_nothing_and_turns_nothing_around():
    name = "\u202eevil\u200b\x1b\U000e0041"
    spans = [(name, 0, 0, 1)]
    row = ({"scope": [name]}, 1, 1)
    drawings = [
        chart(spans=spans, marks=[(0.5, name)]),
        flame(name, [row], [["scope"]], "scope", name),
        grid(name, {name: "code"}, [[f"\tx = 1{name}"]]),
    ]
    data = str(_data(drawn_page("", [("", "", drawings)])))
    assert data.isprintable()
    assert data.count("evil") == 9
    assert "        x = 1" in data


def test_a_page_without_scripts_shows_what_it_was_given():
    tags, text = read_html(sample_page())
    assert "noscript" in [tag for tag, _ in tags]
    assert "Charts and search need JavaScript" in text


def test_a_section_without_parts_is_left_out():
    text = drawn_page("", [("here", "", [chart()]), ("nowhere", "", [])])
    assert "here" in text
    assert "nowhere" not in text


def test_of_many_bands_the_largest_are_shown_and_the_sum_is_kept():
    names = [f"line {i}" for i in range(50)]
    series = {name: [i * 10 + k for k in range(3)] for i, name in enumerate(names)}
    series["other"] = [7, 7, 7]
    levels = [sum(values) for values in zip(*series.values(), strict=True)]
    found = bands("", [0, 1, 2], levels, {"line": series}, 3)["ways"][0]["bands"]
    assert [band["name"] for band in found] == [*names[-19:], "other"]
    assert [sum(v) for v in zip(*(b["values"] for b in found), strict=True)] == levels


def test_a_chart_without_moments_is_a_chart():
    facts = bands("", [], [], {"category": {}}, 3)
    assert facts["peak"] is None


def test_the_peak_is_the_first_highest_moment():
    facts = bands("", TIMES[:4], [1, 5, 5, 2], {"category": {}}, 3)
    assert facts["peak"] == 1


def test_each_name_is_written_once():
    spans = [("a name of a scope", 0, i, i + 1) for i in range(100)]
    stack = ["a name of a frame"] * 100
    drawn = flame("", [({"line": stack}, 1, 1)] * 9, [["line"]], "line", "storages")
    text = drawn_page("", [("", "", [chart(spans=spans, ways={}), drawn])])
    data = json.dumps(_data(text)["drawings"])
    assert data.count("a name of a scope") == 1
    assert data.count("a name of a frame") == 1


def test_the_longest_recording_fits_into_a_page_of_10_mb():
    """A timeline has 2048 moments at the most, 4096 spans, 50 scopes, 20 lines, 500 places."""
    seeded = random.Random(0)

    def series(n):
        return {f"{i} {'n' * 60}": [seeded.randrange(80 << 30) for _ in times] for i in range(n)}

    times = sorted(seeded.random() * 1e4 for _ in range(2048))
    ways = {"category": series(9), "scope": series(50), "line": series(20)}
    levels = [seeded.randrange(80 << 30) for _ in times]
    spans = [(f"scope {i % 50}", i % 5, t, t + 1) for i, t in enumerate(times * 2)]
    stacks = [[f"/home/someone/{k}/{i}.py:1 in {'f' * 40}" for k in range(40)] for i in range(500)]
    rows = [({"line": stack, "category": ["x"]}, 1, 1) for stack in stacks]
    columns = {"made at": "place", "bytes": "bytes"}
    parts = []
    for _ in range(3):
        parts += [
            bands("", times, levels, ways, 1e4, spans),
            flame("", rows, [["line"]], "category", "storages"),
            grid("", columns, [(stack[-1], 1) for stack in stacks]),
        ]
    assert len(drawn_page("", [("", "", parts)]).encode()) < 10_000_000
