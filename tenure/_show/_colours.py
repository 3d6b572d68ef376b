"""Which colour a name has: the same in every bar, chart and table, on white and on black.

Those with a name of their own differ for the colour-blind as well. Derived from the palette of
Okabe and Ito, https://jfly.uni-koeln.de/color/, whose black and yellow vanish on one of the grounds.
"""

from __future__ import annotations

from collections.abc import Iterable

_GREY = "#a9aeb8"
NAMED = {
    "parameters": "#2f5fc4",
    "buffers": "#63bdf0",
    "gradients": "#e39a12",
    "optimizer state": "#b2421f",
    "activations": "#0e8a4a",
    "saved for backward": "#0e8a4a",
    "inputs": "#ef8fb0",
    "made and let go in backward": "#e0d23c",
    "other tensors": "#7d4a86",
    "temporaries": _GREY,
    "temporary or unexplained": _GREY,
    "unexplained": _GREY,
    "other": _GREY,
}
# For what is known by no name here: lines, scopes. Neighbours differ most; then lighter, then darker.
OTHERS = (
    "#2f5fc4", "#e39a12", "#0e8a4a", "#ef8fb0", "#63bdf0", "#b2421f", "#7d4a86", "#b8a90f",
    "#87a3e3", "#f3cc7f", "#6cbd91", "#f7c4d5", "#a9dbf7", "#d48d75", "#b48dbc", "#e9e187",
    "#1d3d80", "#96640a", "#07592f", "#b04a70", "#2a7ba6", "#732a13", "#50305a", "#746b08",
)  # fmt: skip


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each name, in their order; alike ones only where there are very many."""
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
