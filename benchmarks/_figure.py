"""The figure of the page on performance, drawn from the same results as its tables.

Every length and every number in it is that of a row; a row that is gone is an error, and not a gap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT, _ROW = 560, 244, 484, 26
_SPREAD = re.compile(r"(\d\.\d+)(?:-|\.\.| to )(\d\.\d+)")
# A picture in a page sees the browser's scheme and not the page's own switch: so it has a ground.
_STYLE = """
svg{--ink:#1f2328;--faint:#59636e;--line:#8c959f;--card:#f6f8fa;--ours:#0969da;--other:#8c959f}
@media (prefers-color-scheme:dark){
svg{--ink:#e6edf3;--faint:#9198a1;--line:#656c76;--card:#161b22;--ours:#58a6ff;--other:#656c76}}
.card{fill:var(--card);stroke:var(--line);stroke-opacity:.45}
.head{fill:var(--ink);font-size:17px;font-weight:600}
.name{fill:var(--ink);font-size:14px}
.note{fill:var(--faint);font-size:13px}
.axis{stroke:var(--line);stroke-dasharray:4 4}
.spread{stroke:var(--ours);stroke-width:2;stroke-opacity:.5}
.ours{fill:var(--ours)}
.other{fill:var(--other)}
"""


class _Entry(NamedTuple):
    """What the figure calls a row, the file that has it, and how it is called there."""

    label: str
    results: str
    what: str


_STEPS = (
    _Entry("in a scope: ResNet-18", "scopes", "training step in a scope / plain: ResNet-18"),
    _Entry("in a scope: transformer", "scopes", "training step in a scope / plain: transformer"),
    _Entry("step, one piece: transformer", "adaptive", "step that fits / plain step: transformer"),
    _Entry(
        "step, split / by hand: transformer", "adaptive",
        "step in micro-batches / by hand: transformer, 8 in 4",
    ),
    _Entry(
        "step, split / by hand: ResNet-18", "adaptive",
        "step in micro-batches / by hand: ResNet-18 (frozen norms), 8 in 4",
    ),
    _Entry("lazy, one piece: transformer", "lazy", "transformer, 4 layers of 512, whole"),
    _Entry("lazy, one piece: CNN", "lazy", "CNN, whole"),
    _Entry("record_oom: transformer", "record_oom", "4-layer transformer step (d=512)"),
    _Entry(
        "Timeline: GPT of width 512", "timeline",
        "training step of a GPT of 4 blocks of 512, recorded / plain",
    ),
    _Entry(
        "LineProfiler: small GPT", "profiler",
        "training step of a small GPT / plain: line profiler, step and forward",
    ),
)  # fmt: skip
_BLOCKS = "share of the limit: 24 blocks of 32 MB; "
_DIFFUSERS, _OPTIMEM = f"{_BLOCKS}diffusers 0.42.1, ", f"{_BLOCKS}pytorch-optimem 0.0.5, "
_PAGED = (
    _Entry("tenure", "paging", f"{_BLOCKS}a unit a block"),
    _Entry("diffusers, with a stream", "paging", f"{_DIFFUSERS}block_level, use_stream"),
    _Entry("accelerate, cpu_offload", "paging", f"{_BLOCKS}accelerate 1.15.0, cpu_offload"),
    _Entry("diffusers, without", "paging", f"{_DIFFUSERS}block_level"),
    _Entry("pytorch-optimem, page", "paging", f"{_OPTIMEM}page, a layer a block"),
)  # fmt: skip


def drawn(results: Path) -> str:
    """The figure as SVG: what a training step costs, and how near paging comes to its limit.

    Raises:
        LookupError: results have no file or no row that the figure names.
    """
    top = 96
    middle = top + _ROW * len(_STEPS) + 60
    height = middle + 40 + _ROW * len(_PAGED) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        "<title>A training step with tenure / without, and weights that pass</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="4" y="4" width="{_WIDTH - 8}" height="{height - 8}" rx="10"/>',
        _text("head", 24, 38, "A training step: time with / without"),
        _text("note", 24, 60, "a dot is the median of pairs timed alternately, a line 10 to 90 %"),
        *_axis(_on_ratios, (0.8, 0.9, 1.0, 1.1, 1.2), top - 8, middle - 56),
        *_dots(results, top),
        _text("head", 24, middle, "Weights through a device: share of the limit"),
        _text("note", 24, middle + 22, "24 blocks of 32 MB on a simulated link; 1 is all it can"),
        *_bars(results, middle + 40),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _row(results: Path, entry: _Entry) -> tuple[float, str]:
    path = results / f"{entry.results}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for row in rows:
        if row["what"] == entry.what:
            return float(row["value"]), row["note"]
    raise LookupError(
        f"the figure draws {entry.what!r}, and {path.name} has no such row; name the row that is "
        "meant in benchmarks/_figure.py, or run its benchmark."
    )


def _text(kind: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _on_ratios(ratio: float) -> float:
    return _between(ratio, 0.6, 1.45)


def _on_shares(share: float) -> float:
    return _between(share, 0, 1)


def _between(value: float, low: float, high: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * (value - low) / (high - low), 1)


def _axis(
    place: Callable[[float], float], ticks: tuple[float, ...], top: float, bottom: float
) -> Iterator[str]:
    for tick in ticks:
        x = place(tick)
        yield _text("note", x, bottom + 14, f"{tick:.1f}", "middle")
        if tick == 1:
            yield f'<path class="axis" d="M{x:g} {top:g}V{bottom:g}"/>'


def _dots(results: Path, top: int) -> Iterator[str]:
    for n, entry in enumerate(_STEPS):
        value, note = _row(results, entry)
        y = top + _ROW * n
        spread = _SPREAD.search(note)
        if spread is None:
            raise LookupError(f"the note of {entry.what!r} has no spread: {note!r}")
        low, high = (_on_ratios(float(end)) for end in spread.groups())
        yield _text("name", 24, y + 5, entry.label)
        yield f'<path class="spread" d="M{low:g} {y}H{high:g}"/>'
        yield f'<circle class="ours" cx="{_on_ratios(value):g}" cy="{y}" r="5"/>'
        yield _text("name", _WIDTH - 24, y + 5, f"{value:.2f}", "end")


def _bars(results: Path, top: int) -> Iterator[str]:
    for n, entry in enumerate(_PAGED):
        value, _ = _row(results, entry)
        y = top + _ROW * n
        kind = "ours" if n == 0 else "other"
        width = _on_shares(value) - _LEFT
        yield _text("name", 24, y + 14, entry.label)
        yield f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:g}" height="17" rx="3"/>'
        yield _text("name", _WIDTH - 24, y + 14, f"{value:.2f}", "end")
