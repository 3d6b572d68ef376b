"""The least budget that an error names is enough to run the model in, to the last bit."""

import copy

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.paging import PagingError, page, plan_paging

pytestmark = pytest.mark.usefixtures("without_gradients")

_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TEXT = {**_LAYERS, "vocab_size": 64, "max_position_embeddings": 64}
_IMAGE = {**_LAYERS, "image_size": 32, "patch_size": 8}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "CLIP": lambda: transformers.CLIPConfig(
        text_config={**_TEXT, **_SPECIAL}, vision_config=_IMAGE, projection_dim=16
    ),
    "Beit": lambda: transformers.BeitConfig(**_IMAGE, use_relative_position_bias=True),
    "T5": lambda: transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2
    ),
    "XLNet": lambda: transformers.XLNetConfig(
        vocab_size=64, d_model=32, n_layer=3, n_head=2, d_inner=64
    ),
}
TOKENS, PIXELS = torch.randint(3, 60, (2, 7)), torch.randn(2, 3, 32, 32)
ARGUMENTS = {
    "CLIP": {"input_ids": TOKENS, "pixel_values": PIXELS},
    "Beit": {"pixel_values": PIXELS},
    "T5": {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
    "XLNet": {"input_ids": TOKENS},
}


def least_budget_of(model, device, host="pinned"):
    with pytest.raises(PagingError, match=r"can't be paged within 1 B: the least is") as caught:
        page(model, device, budget=1, host=host)
    return caught.value.minimum_bytes


def tensors_of(output):
    return [value.clone() for value in output.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_run_in_the_least_budget_that_an_error_names(name, tmp_path):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(MODELS[name]()).eval()
    arguments = ARGUMENTS[name]
    expected = tensors_of(model(**arguments))
    budget_bytes = least_budget_of(model, "cpu", tmp_path)
    plan = plan_paging(model, "cpu", budget=budget_bytes, host=tmp_path)
    assert plan.allocated_bytes <= budget_bytes == plan.minimum_bytes < plan.weight_bytes // 2
    with page(model, "cpu", budget=budget_bytes, host=tmp_path):
        for _ in range(2):
            found = tensors_of(model(**arguments))
            assert all(map(torch.equal, found, expected))


WIDTH = 16


class Node(nn.Module):
    """Tensors of its own around children, some of which it reads instead of calling them.

    Args:
        own: how many rows its own tensor has.
        early: whether it reads that before its children run and uses it after.
        gives: whether it gives its tensor to its parent, which uses it last.
        children: the nodes inside.
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
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES, percent=st.sampled_from([0, 0, 30, 60]))
def test_any_tree_of_modules_runs_in_the_least_budget_that_an_error_names(sim, tree, percent):
    model = tree.eval()
    x = torch.randn(2, WIDTH)
    sim()
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device))[0].cpu()
    weight_bytes = plan_paging(model, sim.device).weight_bytes
    budget_bytes = max(least_budget_of(model, sim.device), weight_bytes * percent // 100)
    with page(model, sim.device, budget=budget_bytes):
        for _ in range(3):
            assert torch.equal(model(x)[0].cpu(), expected)
    sim.finish()
