"""A drawn page in a real browser: what it shows, what it answers, and that it keeps to itself."""

import re

import pytest

from .browser import Browser, missing
from .drawn_samples import (
    HOSTILE,
    LEVELS,
    MIB,
    PEAK,
    SERIES,
    SPANS,
    TIMES,
    device,
    hostile_page,
    page_of,
    sample_page,
    timeline,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# Keys by WebDriver's numbers, https://www.w3.org/TR/webdriver2/#keyboard-actions.
TAB, ENTER, ESCAPE, END, HOME = "\ue004", "\ue007", "\ue00c", "\ue010", "\ue011"
LEFT, RIGHT, DOWN = "\ue012", "\ue014", "\ue015"
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


def _point(page, at_s, level_bytes=None):
    """Where a moment and a level are drawn."""
    script = """
        const box = document.querySelector('.slider').getBoundingClientRect();
        const texts = [...document.querySelectorAll('.grid text')];
        const find = (text) => texts.find((e) => e.textContent === text).getBoundingClientRect();
        return [box.left, box.top, box.right, find('0 B').bottom - 8, find('64.0 MiB').bottom - 8]
    """
    page.run("document.querySelector('.slider').scrollIntoView({block: 'center'})")
    left, _, right, zero, some = page.run(script)
    x = left + 72 + (right - left - 86) * at_s / 3
    y = zero if level_bytes is None else zero + (some - zero) * level_bytes / (64 * MIB)
    return x, y


def _tip(page):
    return page.run("const t = document.querySelector('.tip'); return t.hidden ? '' : t.innerText")


def _value(page):
    return page.attribute(".slider", "aria-valuetext")


def _exact(n_bytes):
    return f"{n_bytes:,} B"


def test_each_band_is_drawn_and_named_with_its_bytes_at_the_peak(page):
    names = page.run(
        "return [...document.querySelectorAll('.bands path')].map((e) => e.dataset.name)"
    )
    assert names == SHOWN
    rows = page.run(
        "return [...document.querySelectorAll('.legend tbody tr')].map("
        "(row) => [...row.children].map((e) => e.innerText.trim()))"
    )
    at_peak = [f"{SERIES[name][PEAK] / MIB:.1f} MiB" for name in reversed(SHOWN)]
    at_peak = [text.replace("0.0 MiB", "0 B") if text == "0.0 MiB" else text for text in at_peak]
    assert [row[:2] for row in rows[:-1]] == [
        list(p) for p in zip(SHOWN[::-1], at_peak, strict=True)
    ]
    assert rows[-1][:3] == ["total", "166.0 MiB", "100.0 %"]
    assert page.texts(".peak text") == ["peak 166.0 MiB"]
    assert page.texts(".oom text") == ["OOM"]
    assert page.count(".lanes rect") == 4
    assert "95.0 MiB" in page.text("ul.marks")


def _tops_and_peaks(page):
    """Of each chart the highest point of its bands, and where its peak is marked."""
    return page.run("""
        return [...document.querySelectorAll('.slider')].map((chart) => [
          Math.min(...[...chart.querySelectorAll('.bands path')].map((e) => e.getBBox().y)),
          Number(chart.querySelector('.peak circle').getAttribute('cy'))])
    """)


def test_bands_stand_on_each_other_up_to_the_peak(page):
    ((top, peak),) = _tops_and_peaks(page)
    assert top == pytest.approx(peak, abs=0.2)


def test_scopes_stand_below_the_time_that_they_were_open(page):
    lanes = page.run(
        "return [...document.querySelectorAll('.lanes rect')].map("
        "(e) => ['x', 'width'].map((name) => Number(e.getAttribute(name))))"
    )
    width = page.run("return document.querySelector('.slider').clientWidth") - 72 - 14
    drawn = [((x - 72) / width * 3, w / width * 3) for x, w in lanes]
    times = sorted((begin, end) for *_, begin, end in SPANS)
    assert [begin for begin, _ in drawn] == pytest.approx([begin for begin, _ in times], abs=0.01)
    assert [w for _, w in drawn] == pytest.approx([e - b for b, e in times], abs=0.01)


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


def test_a_name_has_one_colour_in_bands_legend_and_flame(page):
    script = """
        const legend = [...document.querySelectorAll('.legend tbody button')].map(
          (e) => [e.innerText.trim(), e.querySelector('rect').getAttribute('fill')]);
        const bands = [...document.querySelectorAll('.bands path')].map(
          (e) => [e.dataset.name, e.getAttribute('fill')]);
        const cells = [...document.querySelectorAll('.cell.leaf')].map(
          (e) => [e.innerText, e.style.getPropertyValue('--tint')]);
        return [legend, bands, cells].map(Object.fromEntries)
    """
    legend, bands, cells = page.run(script)
    assert legend == bands
    assert len(set(bands.values())) == len(SHOWN)
    assert len(cells) == 3
    assert cells.items() <= bands.items()


@pytest.mark.slow
@pytest.mark.parametrize("i", [1, PEAK, 11])
def test_the_pointer_reads_the_exact_bytes_of_a_moment_and_of_a_band(page, i):
    x, y = _point(page, TIMES[i] + 0.01, SERIES["parameters"][i] // 2)
    page.point("mouseMoved", x, y)
    page.until("return !document.querySelector('.tip').hidden")
    assert f"{TIMES[i]:.2f}" in _tip(page)
    assert _exact(LEVELS[i]) in _tip(page)
    assert f"parameters 40.0 MiB ({_exact(SERIES['parameters'][i])})" in _tip(page)
    assert "train" in _tip(page)
    here = page.texts(".legend tbody tr:last-child td:last-child")
    assert here == [f"{LEVELS[i] / MIB:.1f} MiB"]


def test_the_switch_divides_otherwise(page):
    for way, names in (("scope", ["train", "step"]), ("line", ["a.py:1"]), ("category", SHOWN)):
        page.run(f"document.querySelector('.choice input[value={way}]').click()")
        assert page.texts(".legend tbody button bdi") == names[::-1]
        assert page.count(".bands path") == len(names)


def test_a_name_of_the_legend_shows_its_band_alone(page):
    page.run("document.querySelector('.legend tbody button').click()")
    assert page.count(".bands path") == 1
    assert page.run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    page.run("document.activeElement.click()")
    assert page.count(".bands path") == len(SHOWN)


def test_keys_go_along_the_axis(page):
    page.focus(".slider")
    page.press(HOME)
    assert _exact(LEVELS[0]) in _value(page)
    page.press(RIGHT, RIGHT)
    assert _exact(LEVELS[2]) in _value(page)
    page.press(LEFT)
    assert _exact(LEVELS[1]) in _value(page)
    assert _exact(LEVELS[1]) in _tip(page)
    page.press(END)
    assert _exact(LEVELS[-1]) in _value(page)
    page.press("p")
    assert _exact(LEVELS[PEAK]) in _value(page)
    # of no band in particular: the largest is told
    assert f"saved for backward 95.0 MiB ({_exact(95 * MIB)})" in _tip(page)
    assert page.attribute(".slider", "aria-valuenow") == str(TIMES[PEAK])
    page.press("o")
    assert _value(page).startswith("2.500 s: ")


def test_zoom_shows_less_of_the_time_and_all_of_it_again(page):
    def ticks():
        return [text for text in page.texts(".grid text") if text.endswith(" s")]

    whole = ticks()
    page.focus(".slider")
    page.press("p", "+", "+")
    assert ticks() != whole
    assert page.texts(".peak text") == ["peak 166.0 MiB"]
    page.press("0")
    assert ticks() == whole
    (x, y), (to, _) = _point(page, 1.0, MIB), _point(page, 1.4)
    page.drag((x, y), (to, y))
    seconds = [float(text.split()[0]) for text in ticks()]
    assert seconds[0] >= 0.95
    assert seconds[-1] <= 1.45
    # while memory does not run out there
    assert page.texts(".oom text") == []


@pytest.mark.slow
def test_the_flame_is_as_wide_as_its_bytes_and_zooms(page):
    script = """
        const all = document.querySelector('.tree').clientWidth;
        return [...document.querySelectorAll('.cell')].map(
          (e) => [e.innerText, e.getBoundingClientRect().width / all])
    """
    widths = dict(page.run(script))
    assert list(widths)[:3] == ["all", "step", "train.py:9 in main"]
    assert widths["parameters"] == pytest.approx(40 * MIB / LEVELS[PEAK], abs=0.005)
    assert page.text(".readout").startswith(f"all: 166.0 MiB ({_exact(LEVELS[PEAK])})")
    page.run("document.querySelector('.cell').focus()")
    page.press(DOWN, DOWN, DOWN, RIGHT)
    assert "40.0 MiB" in page.text(".readout")
    assert "in step \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} train.py:9 in main" in page.text(
        ".readout"
    )
    page.press(ENTER)
    assert dict(page.run(script))["parameters"] == pytest.approx(1, abs=0.01)
    page.press(ESCAPE)
    assert dict(page.run(script)) == widths
    page.run("document.querySelectorAll('.flame .choice input')[2].click()")
    assert [name for name, _ in page.run(script)][:2] == ["all", "saved for backward"]


def test_search_in_the_flame_sums_up_what_it_finds(page):
    page.write(".flame input[type=search]", "PARAM")
    assert page.text(".readout") == f"Found: 40.0 MiB ({_exact(40 * MIB)}), 24.1 % of all"
    assert page.texts(".cell.found") == ["parameters"]


def test_the_question_mark_shows_the_keys(page):
    page.press("?")
    assert "memory ran out" in page.text("dialog[open]")
    page.press(ESCAPE)
    assert page.attribute("dialog", "open") is None


@pytest.mark.slow
def test_tab_reaches_everything_and_the_focus_is_seen(page):
    page.run("document.body.tabIndex = -1; document.body.focus()")
    seen = []
    for _ in range(40):
        page.press(TAB)
        seen.append(
            page.run(
                "const e = document.activeElement; const s = getComputedStyle(e);"
                "const t = e.matches('.choice input') ? getComputedStyle(e.nextSibling) : s;"
                "return [e.className || e.tagName, e.getAttribute('role'), t.outlineStyle]"
            )
        )
    # the ring of a link is the browser's where it draws one
    assert {name for name, _, ring in seen if ring == "none" and name != "BODY"} == set()
    # the focus goes round
    roles = list(dict.fromkeys(role for _, role, _ in seen if role))
    assert roles == ["slider", "treeitem"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_fits_its_window_and_can_be_read_in_light_and_dark(browser, pages, scheme, width):
    browser.open(pages["sample"], width=width, scheme=scheme)
    browser.until("return document.querySelectorAll('.bands path').length > 0")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    script = """
        const seen = [...document.querySelectorAll('p, th, td, h2, .choice span')];
        return seen.map((e) => {
          let ground = e;
          while (ground && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)')
            ground = ground.parentElement;
          return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
        })
    """
    pairs = {tuple(pair) for pair in browser.run(script)}
    assert {pair for pair in pairs if _contrast(*map(_luminance, pair)) < 4.5} == set()
    ground = _luminance(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert (ground > 0.9) is (scheme == "light")
    assert browser.screenshot(f"drawn-{scheme}-{width}.png").stat().st_size > 10_000


def _luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a, b):
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.slow
def test_hostile_names_are_shown_and_do_nothing(browser, pages):
    browser.open(pages["hostile"])
    n = len(HOSTILE)
    browser.until("return document.querySelectorAll('.bands path').length === arguments[0]", n)
    for kind, shown in (("h2", 3), (".slider", n), (".tree", n)):
        # the help has a heading of its own
        assert browser.count(kind) == shown
    assert browser.run("return window.broken") is None
    assert browser.run("return document.images.length + document.scripts.length") == 2
    # chromedriver has no words for what is no text, which the last has
    names = "[...document.querySelectorAll('.legend bdi')].map((e) => e.innerText)"
    assert browser.run(f"return {names}.slice(0, arguments[0])", n - 1) == [*HOSTILE.values()][:-1]
    browser.run(
        "document.querySelectorAll('button, summary, .cell, .choice input').forEach("
        "(e) => e.click())"
    )
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("return window.broken") is None
    assert browser.errors() == []
    assert browser.requests() == [pages["hostile"].as_uri()]


def test_the_policy_of_the_page_lets_nothing_else_run_or_be_fetched(browser, pages):
    browser.open(pages["sample"])
    browser.run(
        "const e = document.createElement('script'); e.textContent = 'window.broken = 1';"
        "document.body.append(e);"
    )
    assert browser.run("return window.broken") is None
    found = browser.run(
        "return fetch('https://example.org').then(() => 'fetched', () => 'refused')"
    )
    assert found == "refused"
    assert any("Content Security Policy" in text for text in browser.errors())


def test_on_paper_nothing_is_cut_and_no_switch_is_shown(browser, pages):
    browser.open(pages["sample"], scheme="dark")
    browser.until("return document.querySelectorAll('.bands path').length > 0")
    browser.command("Emulation.setEmulatedMedia", media="print")
    hidden = "return [...document.querySelectorAll('.keys, .search')].every(e => !e.offsetParent)"
    assert browser.run(hidden)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert _luminance(ground) == pytest.approx(1)
    assert browser.command("Page.printToPDF")["data"]
