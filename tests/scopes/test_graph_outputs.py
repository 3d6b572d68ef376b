"""What a CUDA graph of ``torch.compile`` hands out again at each replay stays as it is."""

import sys
import types
import weakref

import pytest
import torch

from tenure import (
    NewDisposeScope,
    ScopeUsageWarning,
    attach_to_scope,
    dispose,
    is_disposed,
    owner_of,
    statistics,
)

TREES = "torch._inductor.cudagraph_trees"
LEFT = (
    r"^dispose\(\) left float32\[3\] on cpu, 12 B as it is: a CUDA graph of torch\.compile hands "
    r"this very tensor out at each replay.*Clone it"
)


class Graph:
    """A node of ``cudagraph_trees`` from its second replay on: the same handles come out again."""

    def __init__(self, *outputs):
        self.cached_tensor_outputs = list(outputs)
        for output in outputs:
            torch._C._add_cached_tensor(output)

    def replay(self):
        for output in self.cached_tensor_outputs:
            output.fill_(2.0)
        return tuple(self.cached_tensor_outputs)

    def remove_node_cached_tensors(self):
        for output in self.cached_tensor_outputs:
            torch._C._remove_cached_tensor(output)
        self.cached_tensor_outputs.clear()


@pytest.fixture
def graph(monkeypatch):
    """Torch as it is once a program has compiled with ``mode="reduce-overhead"``."""
    monkeypatch.setitem(sys.modules, TREES, types.ModuleType(TREES))
    torch._C._set_cached_tensors_enabled(True)
    made = Graph(torch.ones(3))
    yield made
    made.remove_node_cached_tensors()
    torch._C._set_cached_tensors_enabled(False)


def test_dispose_leaves_what_the_next_replay_hands_out(graph):
    (out,) = graph.replay()
    mine = out * 2
    with pytest.warns(ScopeUsageWarning, match=LEFT) as caught:
        assert dispose((out, mine)) == (out, mine)
    assert caught[0].filename == __file__
    assert not is_disposed(out)
    assert is_disposed(mine)
    assert graph.replay()[0].tolist() == [2.0] * 3


def test_a_scope_lets_it_go_free_at_its_end_and_when_it_disposes_everything(graph):
    statistics().reset()
    with NewDisposeScope() as scope:
        (out,) = graph.replay()
        attach_to_scope(out)
        scope.dispose_everything()
        assert owner_of(out) is None
        attach_to_scope(out)
    assert not is_disposed(out)
    assert graph.replay()[0].tolist() == [2.0] * 3
    assert statistics().detached_from_scope == 2
    assert statistics().disposed_in_scope == 0


def test_one_that_a_scope_owns_stays_the_scopes_when_disposed_by_name(graph):
    with NewDisposeScope() as scope:
        (out,) = graph.replay()
        attach_to_scope(out)
        with pytest.warns(ScopeUsageWarning, match=LEFT):
            dispose(out)
        assert owner_of(out) is scope
    assert graph.replay()[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("policy", ["report", "raise"])
def test_it_is_no_leak(graph, policy):
    with NewDisposeScope(policy=policy) as scope:
        attach_to_scope(graph.replay())
    assert not scope.leaks


def test_a_disposal_that_a_hook_had_to_put_off_leaves_it_too(graph):
    leaf = torch.ones(3, requires_grad=True)
    (out,) = graph.replay()

    def hook(gradient):
        with pytest.warns(ScopeUsageWarning, match=LEFT):
            dispose(out)

    leaf.register_hook(hook)
    leaf.sum().backward()
    with NewDisposeScope():
        pass
    assert graph.replay()[0].tolist() == [2.0] * 3


def test_views_and_copies_of_it_are_disposed_like_any_other(graph):
    (out,) = graph.replay()
    view, copy = out[1:], out.clone()
    dispose(view, copy)
    assert is_disposed(view)
    assert is_disposed(copy)
    assert graph.replay()[0].tolist() == [2.0] * 3


def test_once_the_graph_is_gone_it_is_a_tensor_like_any_other(graph):
    (out,) = graph.replay()
    graph.remove_node_cached_tensors()
    storage = weakref.ref(out.untyped_storage())
    dispose(out)
    assert is_disposed(out)
    assert storage() is None


def test_no_tensor_is_asked_where_no_graph_of_that_kind_can_be(monkeypatch):
    monkeypatch.delitem(sys.modules, TREES, raising=False)
    monkeypatch.setattr(torch._C, "_is_cached_tensor", None)
    tensor = torch.ones(3)
    dispose(tensor)
    assert is_disposed(tensor)


def test_a_torch_without_the_question_has_no_such_tensors(graph, monkeypatch):
    monkeypatch.delattr(torch._C, "_is_cached_tensor")
    tensor = torch.ones(3)
    dispose(tensor)
    assert is_disposed(tensor)


def test_torch_still_keeps_them_as_the_stand_in_does():
    """The names that the stand-in for a graph goes by stand in torch's own source."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(TREES)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert "torch._C._add_cached_tensor(out)" in source
    assert "outputs.append(cached_t)" in source
    assert "torch._C._remove_cached_tensor(t)" in source
