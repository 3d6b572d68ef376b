"""The least budget that an error names is enough to run a model in, to the last bit."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.paging import PagingError, page, plan_paging

from ..support import FIXTURES_ONCE

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 16


class Node(nn.Module):
    """Tensors of its own around children, some of which it reads instead of calling them.

    It reads its own tensor early, and uses it after its children; or gives it to its parent.
    """

    def __init__(self, own, early, gives, children):
        super().__init__()
        self.early, self.gives = early, gives
        if own:
            self.register_buffer("own", torch.randn(own, WIDTH))
        self.scales = nn.ParameterList([torch.rand(WIDTH) for _ in range(own % 3)])
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.ModuleList(children)

    def forward(self, x):
        own = getattr(self, "own", None)
        given = own[:1] if own is not None and self.early else None
        x = torch.tanh(self.before(x))
        given_by_children = []
        for child in self.inside:
            x, theirs = child(x)
            given_by_children.append(theirs)
        for scale in self.scales:
            x = x * scale
        for each in [given, *given_by_children]:
            x = x if each is None else x + each.sum(0)
        if own is not None and not self.early:
            x = x + self.own.mean(0)
        return x, (own if self.gives else None)


def node(children):
    own = st.sampled_from([0, 0, 1, 4, 40])
    return st.builds(Node, own, st.booleans(), st.booleans(), children)


TREES = st.recursive(
    node(st.just([])), lambda inner: node(st.lists(inner, min_size=1, max_size=3)), max_leaves=8
)


@pytest.mark.exhaustive
@settings(FIXTURES_ONCE, max_examples=40)
@given(tree=TREES, percent=st.sampled_from([0, 0, 30, 60]))
def test_any_tree_of_modules_runs_in_the_least_budget_that_an_error_names(sim, tree, percent):
    model = tree.eval()
    x = torch.randn(2, WIDTH)
    sim()
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device))[0].cpu()
    weight_bytes = plan_paging(model, sim.device).weight_bytes
    with pytest.raises(PagingError, match="the least is") as caught:
        page(model, sim.device, budget=1)
    budget_bytes = max(caught.value.minimum_bytes, weight_bytes * percent // 100)
    with page(model, sim.device, budget=budget_bytes):
        for _ in range(3):
            assert torch.equal(model(x)[0].cpu(), expected)
    sim.finish()
