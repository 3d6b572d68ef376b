"""Patches last while they are needed, whoever else patches the same.

By private names, because what patches serve shows neither when one ends nor who else had patched.
"""

import functools
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import UntypedStorage, nn

from tenure._torch.modules import modules_told
from tenure._torch.patches import Patch
from tenure._torch.replicas import told_of_collectives
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


# --- calls of modules


CALL = nn.Module._wrapped_call_impl


@pytest.fixture
def unwrapped(monkeypatch):
    """As before the first block."""
    monkeypatch.setattr(nn.Module, "__call__", CALL)


def told_of(module):
    seen = []
    with modules_told(lambda each, _: seen.append(each)):
        module(torch.ones(1))
    return seen


def patched():
    call = nn.Module.__call__
    return mock.patch.object(nn.Module, "__call__", lambda self, *args: call(self, *args))


@pytest.fixture
def module(unwrapped):
    return nn.Identity()


class Telling(nn.Module):
    """Has its first call told of while torch.fx traces what is around it."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Identity(), []

    def forward(self, x):
        with modules_told(lambda each, _: self.seen.append(each)):
            return self.inner(x)


def test_a_block_within_that_of_another_patcher_does_not_end_with_it(module):
    with patched():
        assert told_of(module) == [module]
        assert told_of(module) == [module]
    assert nn.Module.__call__ is CALL
    assert told_of(module) == [module]


def test_a_patcher_over_ours_leads_to_one_note_of_a_call(module):
    assert told_of(module) == [module]
    with patched():
        assert told_of(module) == [module]
    assert told_of(module) == [module]


@pytest.mark.usefixtures("unwrapped")
def test_a_trace_of_torch_fx_takes_nothing_away():
    model = Telling()
    torch.fx.symbolic_trace(model)
    assert model.seen == [model.inner]
    model(torch.ones(1))
    assert model.seen == [model.inner] * 2


def test_the_call_is_torchs_own_when_no_block_has_needed_ours_for_a_while(module):
    assert told_of(module) == [module]
    with modules_told(lambda *_: None):
        for _ in range(2000):
            module(1)
        assert nn.Module.__call__ is not CALL
    # how often depends on what this process has done
    n_calls = 0
    while nn.Module.__call__ is not CALL and n_calls < 1_000_000:
        module(1)
        n_calls += 1
    assert nn.Module.__call__ is CALL
    assert told_of(module) == [module]


# --- storages that are resized by no operation


@contextmanager
def resizes_told(told):
    tell(told)
    yield
    tell_no_more(told)


@pytest.fixture
def own(monkeypatch):
    method = UntypedStorage.resize_
    monkeypatch.setattr(UntypedStorage, "resize_", method)
    return method


def test_a_resize_is_told_and_the_method_stands_there_again(own):
    told = []
    with resizes_told(lambda _, n_bytes: told.append(n_bytes)):
        UntypedStorage(8).resize_(2)
    UntypedStorage(8).resize_(4)
    assert told == [2]
    assert UntypedStorage.resize_ is own


def test_a_method_that_was_inherited_is_so_again(monkeypatch):
    # a simulated accelerator has put one of its own there, if one was ever started
    if "resize_" in vars(UntypedStorage):
        monkeypatch.delattr(UntypedStorage, "resize_")
    assert "resize_" not in vars(UntypedStorage)
    with resizes_told(lambda *_: None):
        assert "resize_" in vars(UntypedStorage)
    assert "resize_" not in vars(UntypedStorage)


@pytest.mark.usefixtures("own")
def test_a_method_that_another_puts_over_ours_stays_and_nothing_runs_in_circles():
    calls = []
    with resizes_told(lambda *_: None):
        below = UntypedStorage.resize_

        def over(storage, n_bytes):
            calls.append(n_bytes)
            return below(storage, n_bytes)

        UntypedStorage.resize_ = over
    told = []
    with resizes_told(lambda _, n_bytes: told.append(n_bytes)):
        UntypedStorage(8).resize_(2)
    UntypedStorage(8).resize_(4)
    assert (calls, told) == ([2, 4], [2])
