"""A torch or a Python with which scopes would dispose gradients is refused at import."""

import pytest
import torch

from tenure import statistics
from tenure._torch.counting import OF_CPP, SOLE
from tenure.scopes import _self_test, _tracker


def test_it_passes_in_any_mode_and_counts_nothing():
    before = str(statistics())
    with torch.inference_mode(), torch.device("meta"), torch.no_grad():
        _self_test.check()
    assert str(statistics()) == before


def test_a_gradient_that_is_taken_for_a_new_tensor_is_noticed(monkeypatch):
    # as it was on Python 3.14: of a gradient that is read, one reference went uncounted
    monkeypatch.setattr(_tracker, "SOLE", SOLE + OF_CPP)
    with pytest.raises(ImportError, match=r"on Python 3.*: a scope disposes gradients that were"):
        _self_test.check()
