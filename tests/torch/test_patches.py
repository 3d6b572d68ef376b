"""Patches last while they are needed, whoever else patches the same."""

import functools

import pytest
import torch

from tenure._torch.patches import Patch
from tenure._torch.replicas import told_of_collectives


class Base:
    def inherited(self):
        return ["base"]


@pytest.fixture
def kind():
    class Kind(Base):
        def own(self):
            return ["own"]

    return Kind


def noting(method):
    def noted(self):
        return ["noted", *method(self)]

    return noted


def patch_of(kind, **options):
    return Patch(kind, {"own": noting, "inherited": noting}, **options)


def test_the_first_makes_it_and_the_last_undoes_it(kind):
    before = dict(vars(kind))
    patch = patch_of(kind)
    with patch.block():
        with patch.block():
            pass
        assert kind().own() == ["noted", "own"]
        assert kind().inherited() == ["noted", "base"]
    assert dict(vars(kind)) == before


def test_it_lasts_as_long_as_its_owner(kind):
    class Owner:
        pass

    owner = Owner()
    patch_of(kind).last_while(owner)
    assert kind().own() == ["noted", "own"]
    del owner
    assert kind().own() == ["own"]


def test_one_that_another_patcher_has_restored_over_is_made_again(kind):
    patch, before = patch_of(kind), kind.own
    with patch.block():
        kind.own = before
        assert kind().own() == ["own"]
        with patch.block():
            assert kind().own() == ["noted", "own"]
    assert kind.own is before


@pytest.mark.parametrize("wraps", [functools.wraps, lambda _: lambda function: function])
def test_one_below_that_of_another_patcher_leaves_it_there(kind, wraps):
    patch, before = patch_of(kind), kind.own
    with patch.block():
        ours = kind.own

        @wraps(ours)
        def theirs(self):
            return ["theirs", *ours(self)]

        kind.own = theirs
    assert kind.own is theirs
    # they restore what they saw, and ours is undone when it has been needed once more
    kind.own = ours
    with patch.block():
        assert kind().own() == ["noted", "own"]
    assert kind.own is before


def test_one_that_lingers_goes_when_it_was_called_often_and_nobody_needed_it(kind):
    def noting_calls(method):
        def noted(self):
            patch.was_called()
            return ["noted", *method(self)]

        return noted

    def stands_after(n_calls):
        for _ in range(n_calls):
            kind().own()
        return kind.own is not before

    patch, before = Patch(kind, {"own": noting_calls}, lingers=True), kind.own
    assert not patch.need()
    assert stands_after(900)
    assert patch.need()
    assert stands_after(900)
    with patch.block():
        assert stands_after(3000)
    assert not stands_after(1)
    # each time it stays twice as long
    assert not patch.need()
    assert stands_after(1900)
    assert not stands_after(200)


def test_what_torch_does_not_have_is_not_patched():
    with Patch("torch.not_there", {"name": noting}).block():
        pass
    with Patch(torch.nn.Linear, {"not_there": noting}).block():
        assert not hasattr(torch.nn.Linear, "not_there")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_ask_torch_alone_when_nobody_is_told():
    home = torch.distributed.distributed_c10d
    before = home._rank_not_in_group
    with told_of_collectives(print):
        assert home._rank_not_in_group is not before
    assert home._rank_not_in_group is before
