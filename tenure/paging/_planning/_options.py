"""What is asked for, in numbers: budgets, sizes, names; what means nothing is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn

from tenure._account import available_bytes
from tenure._errors import ByteSizeError, PagingError
from tenure._host_memory import free_host_bytes
from tenure._text import parse_bytes

from .._model import UnitSize


@dataclass(frozen=True, slots=True)
class Budget:
    """What weights may take.

    Attributes:
        n_bytes: allocated.
        free_bytes: reserved, where the budget is a share of what is free; else the user's affair.
    """

    n_bytes: int
    free_bytes: int | None = None


def checked_budget(budget: int | str | None, device: torch.device) -> Budget | None:
    """The bytes of a budget; ``"80%"`` is that share of what is free on the device now.

    Raises:
        PagingError: the share can't be read.
        ByteSizeError: the number of bytes can't be read.
    """
    if budget is None:
        return None
    if isinstance(budget, str) and budget.strip().endswith("%"):
        free_bytes = _free_bytes(device)
        allowed_bytes = available_bytes(device, free_bytes)
        return Budget(int(allowed_bytes * _share(budget)), free_bytes)
    return Budget(parse_bytes(budget))


def checked_kept(model: nn.Module, keep: Iterable[str]) -> list[nn.Module]:
    """The modules of these names.

    Raises:
        PagingError: a name is no module's.
    """
    if isinstance(keep, str):
        raise PagingError(f"keep= takes names of modules, such as keep=({keep!r},).")
    if not isinstance(keep, Iterable):
        raise PagingError(f"keep={keep!r}: write names of modules, such as keep=('head',).")
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = []
    for name in keep:
        if name not in modules:
            raise PagingError(
                f"keep= names {name!r}, which is no module of {type(model).__name__}. "
                "Take names from model.named_modules()."
            )
        kept.append(modules[name])
    return kept


def checked_layer_size(size: object) -> UnitSize | None:
    """A number of parameters, or of bytes as text; None where -1 leaves the choice to the planner.

    Raises:
        PagingError: it is neither.
    """
    if isinstance(size, str):
        try:
            return UnitSize(parse_bytes(size))
        except ByteSizeError as error:
            raise PagingError(f"max_layer_size={size!r} is no number of bytes: {error}") from error
    if isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0):
        return UnitSize(n_parameters=size) if size > 0 else None
    raise PagingError(
        f"max_layer_size={size!r}: write a number of parameters, a number of bytes such as "
        '"64MiB", or -1 to leave it to the planner.'
    )


def check_host(host: object) -> None:
    """Refuse what is no place for weights.

    Raises:
        PagingError: it is neither ``"pinned"`` nor ``"pageable"`` nor a path.
    """
    if not isinstance(host, Path) and host not in ("pinned", "pageable"):
        raise PagingError(
            f'host={host!r}: write host="pinned", host="pageable", or a folder: host=Path(...).'
        )


def check_folder(host: object) -> None:
    """Refuse what is no folder for converted weights.

    Raises:
        PagingError: it is neither a path nor None.
    """
    if host is not None and not isinstance(host, Path):
        raise PagingError(
            f"host={host!r}: the weights stay in their own files. Name a folder, host=Path(...), "
            "for those that have to be converted, or leave it out."
        )


def check_seconds_and_speed(link_bytes_per_s: object, compute_s: object) -> None:
    """Refuse what no plan can be made by; None stands for what is not known.

    Raises:
        PagingError: the speed is not above 0, or the time is below 0, or one is not finite.
    """
    if link_bytes_per_s is not None and not (_is_finite(link_bytes_per_s) and link_bytes_per_s > 0):
        raise PagingError(f"link_bytes_per_s={link_bytes_per_s!r}: write a number above 0.")
    if compute_s is not None and not (_is_finite(compute_s) and compute_s >= 0):
        raise PagingError(f"compute_s={compute_s!r}: write a number of seconds, at least 0.")


def checked_prefetch(prefetch: object) -> int | None:
    """The most units to fetch ahead; None for as many as fit.

    Raises:
        PagingError: it is neither ``"auto"`` nor a number.
    """
    if prefetch == "auto":
        return None
    if isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0:
        return prefetch
    raise PagingError(
        f'prefetch={prefetch!r}: write prefetch="auto", or how many units to fetch ahead at most.'
    )


def check_inference(training: object) -> None:
    """Refuse training.

    Raises:
        PagingError: training was asked for.
    """
    if training:
        raise PagingError(
            "training=True: a paged model can't be trained yet. Page it for inference, or train a "
            "model that fits."
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return free_host_bytes()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise PagingError(
            f"torch.{device.type} can't tell how much of {str(device)!r} is free, of which a share "
            'was asked for. Write budget= as a number of bytes, such as "6GiB".'
        )
    free_bytes, _ = module.mem_get_info(device)
    return int(free_bytes)


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise PagingError(f"budget={text!r}: a share goes from above 0% to 100%.")
    return share


def _is_finite(number: object) -> TypeGuard[float]:
    return isinstance(number, int | float) and math.isfinite(number)
