"""A torch or a Python with which scopes would dispose gradients is refused at import."""

import pytest
import torch

from tenure import NewDisposeScope, TenureWarning, is_disposed, statistics
from tenure._torch import _stand_in, swap
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


def test_without_the_name_that_frees_a_tensor_it_passes_and_scopes_leave_tensors_alone(monkeypatch):
    """A handle that is disposed without a twin would be what `.grad` gives."""
    name = "torch._C._swap_tensor_impl"
    monkeypatch.setattr(swap, "_swap", _stand_in(name, "freeing memory"))
    with pytest.warns(TenureWarning, match=name):
        _self_test.check()
    with pytest.warns(TenureWarning, match=name), NewDisposeScope():
        made = torch.ones(3)
    assert not is_disposed(made)
    assert made.sum() == 3
