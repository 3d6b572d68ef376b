"""Storages that are resized by no operation."""

from contextlib import contextmanager

import pytest
from torch import UntypedStorage

from tenure._torch.resizing import tell, tell_no_more


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
