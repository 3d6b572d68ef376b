"""Blocks that are interrupted as they open or close leave nothing of themselves on the thread."""

import warnings
from contextlib import ExitStack, contextmanager

import pytest
import torch

from tenure import NewDisposeScope, ScopeUsageWarning, current_scope, is_disposed

# private: nothing public can be interrupted in the midst of opening and closing
from tenure.scopes import _disposal, _scope
from tenure.scopes._tracker import Tracker


@pytest.fixture(autouse=True)
def nothing_stays_on_the_thread():
    yield
    assert current_scope() is None
    assert torch._C._len_torch_function_stack() == 0


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_warning_that_is_an_error_or_an_interrupt_leaves_no_scope_open(monkeypatch):
    def items():
        with NewDisposeScope("items"):
            yield 1

    generator = items()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ScopeUsageWarning, match=r"inside the generator .*items\(\)"):
            next(generator)
    monkeypatch.setattr(Tracker, "enter_world", interrupt)
    with pytest.raises(KeyboardInterrupt):
        NewDisposeScope("never").__enter__()


def test_an_interrupt_while_closing_leaves_no_scope_open(monkeypatch):
    with NewDisposeScope("outer") as outer:
        inner = NewDisposeScope("inner").__enter__()
        monkeypatch.setattr(_scope, "take_all", interrupt)
        torch.ones(1)
        with pytest.raises(KeyboardInterrupt):
            inner.close()
        monkeypatch.undo()
        assert inner.closed
        assert current_scope() is outer


def close_in_a_backward_hook(scope):
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: scope.close())
    product = (leaf * leaf).sum()
    product.backward()
    return product


def test_a_scope_that_a_backward_hook_has_closed_is_cleared_by_its_end_or_the_next():
    with NewDisposeScope("step") as scope:
        product = close_in_a_backward_hook(scope)
        assert scope.closed
    assert is_disposed(product)
    for _ in range(3):
        product = close_in_a_backward_hook(NewDisposeScope("step").__enter__())
        assert torch._C._len_torch_function_stack() == 1
    with NewDisposeScope("next"):
        assert is_disposed(product)
        made = torch.ones(2)
    assert is_disposed(made)


def test_a_scope_whose_block_runs_stays_whoever_opens_another():
    class Mine:
        def __enter__(self):
            self.scope = NewDisposeScope("mine").__enter__()

        def __exit__(self, *error):
            self.scope.__exit__(*error)

    @contextmanager
    def managed():
        with NewDisposeScope("managed"):
            yield

    by_hand = NewDisposeScope("by hand").__enter__()
    with Mine(), managed(), ExitStack() as stack:
        stack.enter_context(NewDisposeScope("stacked"))
        with NewDisposeScope("innermost") as scope:
            names = []
            while (scope := scope.outer) is not None:
                names.append(scope.name)
    by_hand.close()
    assert names == ["stacked", "managed", "mine", "by hand"]


def test_an_exception_while_one_tensor_is_disposed_stops_no_other(monkeypatch):
    dispose_tensor = _disposal.dispose_tensor
    unlucky = []

    def dispose_or_interrupt(tensor, *args):
        if not unlucky:
            unlucky.append(tensor)
            raise KeyboardInterrupt
        return dispose_tensor(tensor, *args)

    made = []
    monkeypatch.setattr(_disposal, "dispose_tensor", dispose_or_interrupt)
    with pytest.raises(KeyboardInterrupt), NewDisposeScope():
        made += [torch.ones(1) for _ in range(4)]
    assert [is_disposed(tensor) for tensor in made if tensor is not unlucky[0]] == [True] * 3
