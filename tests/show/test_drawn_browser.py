"""A drawn page in a real browser: what it shows, what it answers, and that it keeps to itself."""

import pytest

from .browser import Browser, missing
from .drawn_samples import (
    HOSTILE,
    LEVELS,
    MIB,
    PEAK,
    SERIES,
    TIMES,
    device,
    hostile_page,
    page_of,
    sample_page,
    timeline,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# Keys by WebDriver's numbers, https://www.w3.org/TR/webdriver2/#keyboard-actions.
ESCAPE, END, HOME, LEFT, RIGHT = "\ue00c", "\ue010", "\ue011", "\ue012", "\ue014"
SHOWN = [name for name, values in SERIES.items() if any(values)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, text in (("sample", sample_page()), ("hostile", hostile_page())):
        found[name] = folder / f"{name}.html"
        found[name].write_text(text, "utf-8")
    return found


@pytest.fixture
def page(browser, pages):
    """The sample, and what must hold whatever was done with it."""
    browser.open(pages["sample"])
    browser.until("return document.querySelectorAll('.bands path').length > 0")
    yield browser
    assert browser.errors() == []
    assert browser.requests() == [pages["sample"].as_uri()]


def _value(page):
    return page.attribute(".slider", "aria-valuetext")


def _exact(n_bytes):
    return f"{n_bytes:,} B"


def _tops_and_peaks(page):
    """Of each chart the highest point of its bands, and where its peak is marked."""
    return page.run("""
        return [...document.querySelectorAll('.slider')].map((chart) => [
          Math.min(...[...chart.querySelectorAll('.bands path')].map((e) => e.getBBox().y)),
          Number(chart.querySelector('.peak circle').getAttribute('cy'))])
    """)


def test_each_band_is_drawn_up_to_the_peak_and_named_with_its_bytes_there(page):
    names = page.run(
        "return [...document.querySelectorAll('.bands path')].map((e) => e.dataset.name)"
    )
    assert names == SHOWN
    rows = page.run(
        "return [...document.querySelectorAll('.legend tbody tr')].map("
        "(row) => [...row.children].map((e) => e.innerText.trim()))"
    )
    at_peak = [f"{SERIES[name][PEAK] / MIB:.1f} MiB" for name in reversed(SHOWN)]
    at_peak = ["0 B" if text == "0.0 MiB" else text for text in at_peak]
    assert [row[:2] for row in rows[:-1]] == [
        list(p) for p in zip(SHOWN[::-1], at_peak, strict=True)
    ]
    assert rows[-1][:3] == ["total", "166.0 MiB", "100.0 %"]
    assert page.texts(".peak text") == ["peak 166.0 MiB"]
    assert page.texts(".oom text") == ["OOM"]
    assert "95.0 MiB" in page.text("ul.marks")
    ((top, peak),) = _tops_and_peaks(page)
    assert top == pytest.approx(peak, abs=0.2)


def test_of_more_moments_than_pixels_the_highest_are_drawn(browser, tmp_path):
    # nine moments share a column of pixels: at most one of these peaks is the first in its column
    devices = []
    for place in (4321, 4323):
        levels = [MIB] * 9000
        levels[place] = 50 * MIB
        devices.append(device([*range(9000)], levels, category={"inputs": levels}))
    path = tmp_path / "dense.html"
    path.write_text(page_of(timeline(*devices, duration_s=9000)), "utf-8")
    browser.open(path)
    browser.until("return document.querySelectorAll('.bands path').length > 1")
    for top, peak in _tops_and_peaks(browser):
        assert top == pytest.approx(peak, abs=0.2)
    browser.focus(".slider")
    assert _exact(50 * MIB) in _value(browser)


def test_the_switch_divides_otherwise_and_a_name_of_the_legend_shows_its_band_alone(page):
    for way, names in (("scope", ["train", "step"]), ("line", ["a.py:1"]), ("category", SHOWN)):
        page.run(f"document.querySelector('.choice input[value={way}]').click()")
        assert page.texts(".legend tbody button bdi") == names[::-1]
        assert page.count(".bands path") == len(names)
    page.run("document.querySelector('.legend tbody button').click()")
    assert page.count(".bands path") == 1


def test_keys_go_along_the_axis_zoom_and_show_themselves(page):
    def ticks():
        return [text for text in page.texts(".grid text") if text.endswith(" s")]

    page.focus(".slider")
    for key, level in ((HOME, 0), (RIGHT, 1), (RIGHT, 2), (LEFT, 1), (END, -1), ("p", PEAK)):
        page.press(key)
        assert _exact(LEVELS[level]) in _value(page)
    # of no band in particular: the largest is told
    assert f"saved for backward 95.0 MiB ({_exact(95 * MIB)})" in page.text(".tip")
    assert page.attribute(".slider", "aria-valuenow") == str(TIMES[PEAK])
    page.press("o")
    assert _value(page).startswith("2.500 s: ")
    whole = ticks()
    page.press("p", "+", "+")
    assert ticks() != whole
    assert page.texts(".peak text") == ["peak 166.0 MiB"]
    page.press("0")
    assert ticks() == whole
    page.press("?")
    assert "memory ran out" in page.text("dialog[open]")
    page.press(ESCAPE)
    assert page.attribute("dialog", "open") is None


def test_the_flame_is_as_wide_as_its_bytes_zooms_and_is_searched(page):
    script = """
        const all = document.querySelector('.tree').clientWidth;
        return [...document.querySelectorAll('.cell')].map(
          (e) => [e.innerText, e.getBoundingClientRect().width / all])
    """
    widths = dict(page.run(script))
    assert list(widths)[:3] == ["all", "step", "train.py:9 in main"]
    assert widths["parameters"] == pytest.approx(40 * MIB / LEVELS[PEAK], abs=0.005)
    assert page.text(".readout").startswith(f"all: 166.0 MiB ({_exact(LEVELS[PEAK])})")
    page.write(".flame input[type=search]", "PARAM")
    assert page.text(".readout") == f"Found: 40.0 MiB ({_exact(40 * MIB)}), 24.1 % of all"
    assert page.texts(".cell.found") == ["parameters"]
    page.click(".cell.found")
    assert dict(page.run(script))["parameters"] == pytest.approx(1, abs=0.01)


def test_hostile_names_are_shown_and_do_nothing(browser, pages):
    browser.open(pages["hostile"])
    n = len(HOSTILE)
    browser.until("return document.querySelectorAll('.bands path').length === arguments[0]", n)
    for kind, shown in (("h2", 3), (".slider", n), (".tree", n)):
        # the help has a heading of its own
        assert browser.count(kind) == shown
    # chromedriver has no words for what is no text, which the last has
    names = "[...document.querySelectorAll('.legend bdi')].map((e) => e.innerText)"
    assert browser.run(f"return {names}.slice(0, arguments[0])", n - 1) == [*HOSTILE.values()][:-1]
    browser.run(
        "document.querySelectorAll('button, summary, .cell, .choice input').forEach("
        "(e) => e.click())"
    )
    assert browser.run("return document.images.length + document.scripts.length") == 2
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("return window.broken") is None
    assert browser.errors() == []
    assert browser.requests() == [pages["hostile"].as_uri()]
