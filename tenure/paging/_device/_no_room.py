"""The error of a forward that needs more at once than there is room for: who holds the room."""

from __future__ import annotations

from typing import NoReturn

import torch

from tenure._errors import PagingError
from tenure._text import format_bytes

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
    told = "; ".join(map(_told, sorted(pages, key=lambda page: -page.unit.n_bytes)[:_N_NAMED]))
    more = f"; and {len(pages) - _N_NAMED} more" if len(pages) > _N_NAMED else ""
    advice = _ADVICE if is_held else "What runs needs all of these at once: "
    if is_held and torch.is_grad_enabled():
        advice = f"A graph of autograd holds weights: run under torch.no_grad(). {advice}"
    raise PagingError(
        f"{unit.name!r} ({format_bytes(unit.n_bytes)}) has no room on {device}: "
        f"{format_bytes(ring_bytes)} are there for passing units. In use: {told or 'nothing'}"
        f"{more}. "
        f"{advice}allow a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes).",
        budget_bytes,
    )


def _told(page: Page) -> str:
    stays = ", which stays" if page.is_resident else ""
    held = page.held()
    why = f", for {_listed(held)} or what shares its memory is held" if held else ""
    return f"{page.unit.name!r} ({format_bytes(page.unit.n_bytes)}{stays}){why}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return ", ".join(map(repr, names[:_N_NAMED])) + more
