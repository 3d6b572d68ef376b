"""What a call returned, with a place for each tensor: the container that handles are put into."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def template_of(value: Any, places: dict[int, int], outs: list[Any]) -> Any:
    """What was returned, with an `Out` for each tensor."""
    if isinstance(value, Tensor):
        place = places.get(id(value))
        if place is not None:
            return Out(-1 - place)
        outs.append(value)
        return Out(len(outs) - 1)
    if isinstance(value, tuple | list):
        return rebuilt(value, [template_of(each, places, outs) for each in value])
    if isinstance(value, dict):
        return {key: template_of(each, places, outs) for key, each in value.items()}
    return value


def numbers_in(template: Any, numbers: list[int]) -> list[int | None]:
    """The numbers of the tensors in what a call gives; None for one that it was given."""
    if isinstance(template, Out):
        return [numbers[template] if template >= 0 else None]
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, tuple | list):
        return [number for each in template for number in numbers_in(each, numbers)]
    return []


class Out(int):
    """The place of a tensor in what a call gives; below zero one that it was given."""


def rebuilt(like: Any, children: list[Any]) -> Any:
    """A container like another one."""
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def is_plain_value(value: Any) -> bool:
    """Whether a call gave something that is no tensor and holds none."""
    if isinstance(value, tuple | list):
        return all(map(is_plain_value, value))
    return not isinstance(value, Out) and value is not None
