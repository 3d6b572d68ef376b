"""What a page of HTML is made of, as a strict reader finds it."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_html(text):
    """The tags with their attributes, and the text; each tag is closed where it should be."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader.tags, "".join(reader.text)


def assert_stands_alone(text, *, is_drawn=False):
    """It names no other file and no address; one that is drawn has a script of its own."""
    tags, _ = read_html(text)
    for tag, attributes in tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert tag != "script" or is_drawn
        assert attributes.pop("href", "#").startswith("#")
        assert not {"src", "xlink:href", "srcset"} & set(attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text


def read_data(text):
    """The data that the scripts of a drawn page draw."""
    (found,) = re.findall(r'<script [^>]*id="data">(.*?)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(found)))
