"""Patches last while they are needed, whoever else patches the same.

By private names, because what patches serve shows neither when one ends nor who else had patched.
"""

import functools
from unittest import mock

import pytest
from torch import UntypedStorage, nn

from tenure._torch.modules import modules_told
from tenure._torch.patches import Patch
from tenure._torch.resizing import tell, tell_no_more


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


def test_the_first_makes_it_and_the_last_or_the_end_of_its_owner_undoes_it(kind):
    class Owner:
        pass

    before = dict(vars(kind))
    patch, owner = patch_of(kind), Owner()
    with patch.block():
        with patch.block():
            pass
        assert kind().own() == ["noted", "own"]
        assert kind().inherited() == ["noted", "base"]
    assert dict(vars(kind)) == before
    patch.last_while(owner)
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
        return lambda self: [patch.was_called(), *method(self)]

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


def test_a_resize_of_a_storage_is_told_and_the_method_stands_there_again():
    told, own = [], UntypedStorage.resize_

    def note(storage, n_bytes):
        told.append(n_bytes)

    tell(note)
    UntypedStorage(8).resize_(2)
    tell_no_more(note)
    UntypedStorage(8).resize_(4)
    assert told == [2]
    assert UntypedStorage.resize_ is own


def test_a_patcher_over_ours_leads_to_one_note_of_a_call_of_a_module():
    module, seen = nn.Identity(), []
    call = nn.Module.__call__
    with (
        mock.patch.object(nn.Module, "__call__", lambda self, *args: call(self, *args)),
        modules_told(lambda each, _: seen.append(each)),
    ):
        module(1)
    assert seen == [module]
