from hypothesis import given
from hypothesis import strategies as st

from tenure.paging._device._pass import AccessOrder, Pass

NAMES = st.sampled_from("abcdef")
PASSES = st.lists(st.lists(NAMES, max_size=8), min_size=1, max_size=6)


def run(order, names, kind="forward", completed=True):
    """Runs a pass; what was expected before each step, and after the last."""
    now, expected = Pass(order, kind), []
    now.begin()
    for name in names:
        expected.append("".join(now.upcoming()))
        now.note(name)
    now.end(completed=completed)
    return [*expected, "".join(now.upcoming())]


def test_nothing_is_expected_of_the_first_pass():
    assert run(AccessOrder(), "abc")[:3] == ["", "", ""]


def test_a_pass_is_expected_to_be_like_the_last_one_and_to_be_followed_by_its_like():
    order = AccessOrder()
    run(order, "abc")
    run(order, "abc")
    assert run(order, "abc") == ["abcabc", "bcabc", "cabc", "abc"]


def test_after_a_step_that_was_not_expected_the_prediction_follows():
    order = AccessOrder()
    run(order, "abcd")
    run(order, "abcd")
    assert run(order, "axcbd") == ["abcdabcd", "bcdabcd", "bcdabcd", "dabcd", "cdabcd", "axcbd"]


def test_what_comes_twice_is_expected_twice():
    order = AccessOrder()
    run(order, "aba")
    run(order, "aba")
    assert run(order, "aba")[1:] == ["baaba", "aaba", "aba"]


def test_kinds_that_take_turns_are_expected_in_turn():
    order = AccessOrder()
    for _ in range(2):
        run(order, "ab", kind="encode")
        *_, after_decoding = run(order, "xy", kind="decode")
    *_, after_encoding = run(order, "ab", kind="encode")
    assert (after_decoding, after_encoding) == ("ab", "xy")


def test_a_pass_that_raised_teaches_nothing():
    order = AccessOrder()
    run(order, "abc")
    run(order, "c", completed=False)
    assert run(order, "abc")[0].startswith("abc")


@given(passes=PASSES)
def test_nothing_is_expected_that_the_last_pass_did_not_use(passes):
    order, last = AccessOrder(), []
    for names in passes:
        for expected in run(order, names)[:-1]:
            assert set(expected) <= set(last)
        last = names
