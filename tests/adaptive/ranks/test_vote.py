"""What a rank says in a vote: vectors of one length, or an error before it says anything."""

import pytest

from tenure.adaptive import AdaptiveUsageError
from tenure.adaptive._ranks import MOST_TERMS, Ballot, weights_of


@pytest.mark.parametrize("n_terms", [0, 1, MOST_TERMS])
def test_weights_of_any_number_of_terms_take_the_room_of_a_ballot_without_any(n_terms):
    weights = weights_of([0.5] * n_terms, "weight() returned weights of")
    assert len(weights) == len(Ballot().weights)
    assert weights[:n_terms] == (0.5,) * n_terms
    assert not any(weights[n_terms:])


def test_more_terms_than_a_vote_has_room_for_are_refused_and_not_said():
    with pytest.raises(AdaptiveUsageError, match=r"^weight\(\) returned weights of 17 terms, and"):
        weights_of([1.0] * (MOST_TERMS + 1), "weight() returned weights of")
