"""Text that shows each of its characters and does nothing else; without torch.

Names come from files, from keys of dictionaries and from other machines: what they do to a terminal
or a page must not be their choice.
"""

from __future__ import annotations

import re

# What a terminal obeys, what ends a line for some readers alone, what turns the text beside it
# around, halves of characters, which no file takes, and whatever Unicode shows as nothing:
# https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt, under
# "Default_Ignorable_Code_Point". A line feed is none of these.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufff9-\ufffb"
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
_MOST_CHARACTERS = 2000


def visible(text: str) -> str:
    """Return the text with each character that would not show as Python writes it in a literal."""
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub(_spelled, text)


def in_one_line(text: str) -> str:
    """Return the text as one visible line; if it is very long, without its middle."""
    line = " ".join(text.split())
    if len(line) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        line = f"{line[:half]} ... {line[-half:]}"
    return visible(line)


def _spelled(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]
