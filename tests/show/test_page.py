"""A page needs nothing beside itself."""

from tenure._show import drawn_page

from .pages import assert_stands_alone, read_html


def test_a_page_stands_alone():
    text = drawn_page("What <fits>", {"devices": []}, "<p>body</p>")
    assert_stands_alone(text, is_drawn=True)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    tags, shown = read_html(text)
    assert shown.count("What <fits>") == 2
    assert "<p>body</p>" in text
    assert [tag for tag, _ in tags][-2:] == ["script", "script"]


def test_a_page_is_readable_in_the_dark_and_on_paper():
    text = drawn_page("", {"devices": []}, "")
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text
