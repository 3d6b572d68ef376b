"""The page of a timeline alone."""

from __future__ import annotations

from tenure._show import Fact, Shown, drawn_page
from tenure._text import counted, format_bytes

from ._peaks import largest_of
from ._timeline_sections import TimelineFacts, Track, sections_of


def timeline_page(timeline: TimelineFacts, title: str = "Memory over time") -> str:
    """A page that draws a timeline, and needs no other file and no network.

    Args:
        timeline: a `TimelineReport`.
        title: what stands above it.
    """
    return drawn_page(
        title,
        sections_of(timeline),
        told=f"{timeline.duration_s:.2f} s",
        facts=facts_of(timeline),
        otherwise=timeline._repr_html_() if isinstance(timeline, Shown) else "",
    )


def facts_of(timeline: TimelineFacts) -> list[Fact]:
    """The peaks, and how often memory ran out."""
    facts = [
        Fact(
            f"peak of {device.device}",
            format_bytes(device.peak_bytes),
            _at_peak(device),
        )
        for device in timeline.devices
    ]
    if timeline.ooms:
        facts.append(
            Fact(
                "ran out of memory",
                counted(len(timeline.ooms), "time"),
                f"first after {timeline.ooms[0].at_s:.2f} s",
                True,
            )
        )
    return facts


def _at_peak(device: Track) -> str:
    when, most = f"after {device.peak_at_s:.2f} s", largest_of(device.at_peak)
    return f"{when}; of it {most}" if most else when
