"""Which colour a name has: the same in every bar, chart and table, on white and on black.

Those with a name of their own differ for the colour-blind as well. Derived from the palette of
Okabe and Ito, https://jfly.uni-koeln.de/color/, whose black and yellow vanish on a ground.
"""

from __future__ import annotations

from collections.abc import Iterable

_GREY = "#ccd1d9"
NAMED = {
    "parameters": "#4a80f8",
    "buffers": "#3fb4fb",
    "gradients": "#ffc154",
    "optimizer state": "#8733a9",
    "activations": "#21775f",
    "saved for backward": "#21775f",
    "inputs": "#ea79a8",
    "temporary in backward": "#ab9a21",
    "other tensors": "#c43100",
    "temporaries": _GREY,
    "temporary or unexplained": _GREY,
    "unexplained": _GREY,
    "rounding": _GREY,
    "other": _GREY,
}
# For lines and scopes, which have any name. Neighbours differ most; then lighter, then darker.
OTHERS = (
    "#4a80f8", "#ffc154", "#21775f", "#ea79a8", "#3fb4fb", "#c43100", "#8733a9", "#ab9a21",
    "#a4c0fc", "#f4cd85", "#90bbaf", "#f4bcd4", "#9fdafd", "#e29880", "#c399d4", "#d5cc90",
    "#2c4d95", "#997432", "#144739", "#8c4965", "#266c97", "#761d00", "#5c2673", "#675c14",
)  # fmt: skip


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each name, in their order; alike ones only where there are very many."""
    found: dict[str, str] = {}
    n_others = 0
    for name in names:
        if name in found:
            continue
        colour = NAMED.get(name)
        if colour is None:
            colour = OTHERS[n_others % len(OTHERS)]
            n_others += 1
        found[name] = colour
    return found
