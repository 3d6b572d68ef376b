"""Names keep their colours; those of categories differ for the colour-blind, on both grounds."""

import itertools
import math

import pytest

from tenure._show._colours import NAMED, OTHERS, colours_of

# What is left of linear red, green and blue; Machado, Oliveira and Fernandes, 2009, severity 1.
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def _linear(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _oklab(linear):
    """Where distances are those that are seen; https://bottosson.github.io/posts/oklab/."""
    cones = _times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        [max(each, 0) for each in linear],
    )
    return _times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        [each ** (1 / 3) for each in cones],
    )


def _contrast(colour, other):
    weights = (0.2126, 0.7152, 0.0722)
    a, b = (sum(_times((weights,), _linear(each))) + 0.05 for each in (colour, other))
    return max(a, b) / min(a, b)


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_of_categories_differ_however_one_sees(sight):
    seen = {c: _oklab(_times(SIGHTS[sight], _linear(c))) for c in NAMED.values()}
    nearest = min(itertools.combinations(seen, 2), key=lambda pair: math.dist(*map(seen.get, pair)))
    assert math.dist(*map(seen.get, nearest)) > 0.1, nearest


@pytest.mark.parametrize("ground", ["#ffffff", "#16181b"])
def test_every_colour_is_seen_on_light_and_dark(ground):
    faint = {c for c in (*NAMED.values(), *OTHERS) if _contrast(c, ground) < 1.5}
    assert faint == set()


def test_a_name_has_its_colour_and_others_take_the_next():
    found = colours_of(["gradients", "b", "a", "b", "gradients"])
    assert found == {"gradients": NAMED["gradients"], "b": OTHERS[0], "a": OTHERS[1]}
    assert len(set(colours_of(map(str, range(24))).values())) == 24
