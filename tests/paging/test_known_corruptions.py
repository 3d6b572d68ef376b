"""Programs that other pagers compute wrongly are right here, and no race is found."""

import pytest

from .known_corruptions import PROGRAMS

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_went_wrong_elsewhere_is_right(sim, tmp_path, name):
    PROGRAMS[name](sim, tmp_path)
    sim.finish()
