"""A page needs nothing beside itself."""

from tenure._show import page

from .pages import assert_stands_alone, read_html


def test_a_page_stands_alone():
    text = page("What <fits>", "<p>body</p>")
    assert_stands_alone(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    tags, shown = read_html(text)
    assert shown.count("What <fits>") == 2
    assert [tag for tag, _ in tags][-3:] == ["body", "h1", "p"]


def test_a_page_is_readable_in_the_dark_and_on_paper():
    text = page("", "")
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text
