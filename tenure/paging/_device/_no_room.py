"""The error of a forward that needs more at once than there is room for: who holds the room."""

from __future__ import annotations

from typing import NoReturn

import torch

from tenure._errors import PagingError
from tenure._text import format_bytes, listed

from .._model import Unit
from ._page import Page

_N_NAMED = 4
_ADVICE = (
    "What holds tensors beyond their use is a variable, a view or a container, in the code of the "
    "model or in yours: clone() what is kept, or "
)


def refuse(
    unit: Unit, device: torch.device, ring_bytes: int, pages: list[Page], budget_bytes: int
) -> NoReturn:
    """Raise for a unit that has no room.

    Args:
        unit: what is needed now.
        device: where.
        ring_bytes: the room for units that pass.
        pages: what is in use, or held by something.
        budget_bytes: the budget that would do.
    """
    is_held = any(page.held() for page in pages)
    told = [_told(page) for page in sorted(pages, key=lambda page: -page.unit.n_bytes)]
    advice = _ADVICE if is_held else "What runs needs all of these at once: "
    if is_held and torch.is_grad_enabled():
        advice = f"A graph of autograd holds weights: run under torch.no_grad(). {advice}"
    raise PagingError(
        f"{unit.name!r} ({format_bytes(unit.n_bytes)}) has no room on {device}: "
        f"{format_bytes(ring_bytes)} are there for passing units. In use: "
        f"{listed(told, _N_NAMED, '; ') or 'nothing'}. "
        f"{advice}allow a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes).",
        budget_bytes,
    )


def _told(page: Page) -> str:
    stays = ", which stays" if page.is_resident else ""
    held = page.held()
    names = listed([*map(repr, held)], _N_NAMED)
    why = f", for {names} or what shares its memory is held" if held else ""
    return f"{page.unit.name!r} ({format_bytes(page.unit.n_bytes)}{stays}){why}"
