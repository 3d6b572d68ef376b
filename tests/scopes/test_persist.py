"""Stepping out of all scopes."""

import pytest
import torch

from tenure import NewDisposeScope, ScopeUsageError, current_scope, is_disposed, owner_of, persist


def test_what_is_made_inside_belongs_to_no_scope():
    with NewDisposeScope() as scope:
        with persist():
            kept = torch.ones(1)
            assert current_scope() is None
        assert current_scope() is scope
        made = torch.ones(1)
    assert not is_disposed(kept)
    assert is_disposed(made)


def test_a_scope_inside_has_no_outer():
    with NewDisposeScope(), persist():
        with NewDisposeScope() as inner:
            assert inner.outer is None
            moved = inner.move_to_outer(torch.ones(1))
            temporary = torch.ones(1)
        assert owner_of(moved) is None
        assert is_disposed(temporary)
    assert not is_disposed(moved)


def test_it_decorates_a_function_that_fills_a_cache_and_recurses():
    cache = {}

    @persist()
    def cached(n):
        if n not in cache:
            cache[n] = torch.full((1,), float(n)) + (cached(n - 1) if n else 0)
        return cache[n]

    with NewDisposeScope():
        total = cached(3) + 0
    assert is_disposed(total)
    assert cache[3].item() == 6


def test_it_comes_back_after_an_exception():
    with NewDisposeScope() as scope:
        with pytest.raises(ValueError, match="mine"), persist():
            raise ValueError("mine")
        assert current_scope() is scope


def test_it_nests_and_without_a_scope_does_nothing():
    step_out = persist()
    with step_out, step_out:
        assert current_scope() is None
    with NewDisposeScope() as scope, persist():
        with persist():
            pass
        assert current_scope() is None
    assert scope.closed


def test_a_scope_that_closed_meanwhile_is_not_returned_to():
    scope = NewDisposeScope()
    scope.__enter__()
    with persist():
        scope.close()
    assert current_scope() is None
    assert not is_disposed(torch.ones(1))


def test_a_decorator_without_parentheses_says_how_to_write_it():
    with pytest.raises(ScopeUsageError, match=r"takes no argument and got <function .*Write @per"):

        @persist
        def cached():
            pass
