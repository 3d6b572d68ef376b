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
    """A node of ``cudagraph_trees`` from its second replay on: the same handle comes out again."""

    def __init__(self):
        self.output = torch.ones(3)
        torch._C._add_cached_tensor(self.output)

    def replay(self):
        return self.output.fill_(2.0)

    def remove_node_cached_tensors(self):
        if self.output is not None:
            torch._C._remove_cached_tensor(self.output)
        self.output = None


@pytest.fixture
def graph(monkeypatch):
    """Torch as it is once a program has compiled with ``mode="reduce-overhead"``."""
    monkeypatch.setitem(sys.modules, TREES, types.ModuleType(TREES))
    torch._C._set_cached_tensors_enabled(True)
    made = Graph()
    yield made
    made.remove_node_cached_tensors()
    torch._C._set_cached_tensors_enabled(False)


def test_dispose_leaves_what_the_next_replay_hands_out_and_disposes_views_and_copies(graph):
    out = graph.replay()
    mine, view = out * 2, out[1:]
    with pytest.warns(ScopeUsageWarning, match=LEFT) as caught:
        assert dispose((out, mine, view)) == (out, mine, view)
    assert caught[0].filename == __file__
    assert [is_disposed(t) for t in (out, mine, view)] == [False, True, True]
    assert graph.replay().tolist() == [2.0] * 3


def test_a_scope_lets_it_go_free_at_its_end_and_when_it_disposes_everything(graph):
    statistics().reset()
    with NewDisposeScope(policy="raise") as scope:
        out = attach_to_scope(graph.replay())
        scope.dispose_everything()
        assert owner_of(out) is None
        attach_to_scope(out)
        with pytest.warns(ScopeUsageWarning, match=LEFT):
            dispose(out)
        assert owner_of(out) is scope
    assert not scope.leaks
    with NewDisposeScope():
        attach_to_scope(out)
    assert graph.replay().tolist() == [2.0] * 3
    assert statistics().detached_from_scope == 3
    assert statistics().disposed_in_scope == 0


def test_a_disposal_that_a_hook_had_to_put_off_leaves_it_too(graph):
    leaf = torch.ones(3, requires_grad=True)
    scope = NewDisposeScope().__enter__()
    attach_to_scope(graph.replay())
    leaf.register_hook(lambda _: scope.close())
    leaf.sum().backward()
    with NewDisposeScope():
        pass
    assert graph.replay().tolist() == [2.0] * 3


def test_once_the_graph_is_gone_it_is_a_tensor_like_any_other(graph):
    out = graph.replay()
    graph.remove_node_cached_tensors()
    storage = weakref.ref(out.untyped_storage())
    dispose(out)
    assert is_disposed(out)
    assert storage() is None
