"""Modules are told of as they are called, whoever else patches their call."""

from unittest import mock

import pytest
import torch
from torch import nn

from tenure._torch.modules import modules_told

CALL = nn.Module._wrapped_call_impl


@pytest.fixture(autouse=True)
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


class Telling(nn.Module):
    """Has its first call told of while torch.fx traces what is around it."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Identity(), []

    def forward(self, x):
        with modules_told(lambda each, _: self.seen.append(each)):
            return self.inner(x)


def test_a_block_within_that_of_another_patcher_does_not_end_with_it():
    module = nn.Identity()
    with patched():
        assert told_of(module) == [module]
        assert told_of(module) == [module]
    assert nn.Module.__call__ is CALL
    assert told_of(module) == [module]


def test_a_patcher_over_ours_leads_to_one_note_of_a_call():
    module = nn.Identity()
    assert told_of(module) == [module]
    with patched():
        assert told_of(module) == [module]
    assert told_of(module) == [module]


def test_a_trace_of_torch_fx_takes_nothing_away():
    model = Telling()
    torch.fx.symbolic_trace(model)
    assert model.seen == [model.inner]
    model(torch.ones(1))
    assert model.seen == [model.inner] * 2


def test_the_call_is_torchs_own_when_no_block_has_needed_ours_for_a_while():
    module = nn.Identity()
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
