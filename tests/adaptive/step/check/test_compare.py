"""What counts as rounding when a split is compared with the whole."""

import pytest

from tenure.adaptive._step._verify._compare import is_noise


def _linear(n, draw):
    return 1e-6 * n


def _of_another_choice(n, draw):
    """A loss that picks its samples by comparing: any rounding at all makes it pick others."""
    return 0.2 if n else 0.0


@pytest.mark.parametrize(
    ("error", "noise", "expected"),
    [
        (1e-5, _linear, True),
        (2e-5, _linear, False),
        (0.44, _of_another_choice, False),
        (0.1, _of_another_choice, False),
        (0.1, lambda n, draw: 0.01, True),  # a second run is as far off
        (0.0, lambda n, draw: 0.0, True),
    ],
)
def test_noise_is_what_grows_with_the_rounding_or_differs_between_two_runs(error, noise, expected):
    assert is_noise(error, noise) is expected


def test_rougher_runs_are_only_made_where_a_second_run_explains_nothing():
    asked = []

    def noise(n, draw):
        asked.append((n, draw))
        return 1.0

    assert is_noise(0.5, noise)
    assert asked == [(0, 0)]
