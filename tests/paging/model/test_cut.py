"""How a model is cut, as its plan shows: what a unit is, what it shares, and how large it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.paging import PagingError, page, plan_paging

from ..models import linears
from ..support import FIXTURES_ONCE, assert_equal

WIDTH = 16
LINEAR_BYTES = 4 * WIDTH * WIDTH + 256  # a weight, and a bias in 256 bytes of its own
UNIT_ALIGNMENT_BYTES = 512


def linear():
    return nn.Linear(WIDTH, WIDTH)


def rounded(n_bytes, to=UNIT_ALIGNMENT_BYTES):
    return -(-n_bytes // to) * to


def units_of(model, size, folder, **options):
    """The names of the units of a plan, and their bytes."""
    plan = plan_paging(model, "cpu", f"{size}B", host=folder, **options)
    return {unit.name: unit.n_bytes for unit in plan.units}


class Block(nn.Module):
    """Has a tensor of its own beside its children, as a vision transformer has its positions."""

    def __init__(self, *children):
        super().__init__()
        self.inner = nn.ModuleList(children)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for each in self.inner:
            x = each(x)
        return x * self.scale[0]


def tied():
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), linear(), linear())
    model[2].weight = model[0].weight
    return model


def twice():
    layer = linear()
    return nn.Sequential(layer, linear(), layer)


def views():
    """The weights of two layers are parts of one storage."""
    model = linears(2, WIDTH)
    both = torch.randn(2, WIDTH, WIDTH)
    model[0].weight, model[1].weight = (nn.Parameter(each) for each in both)
    return model


@pytest.mark.parametrize(
    ("make", "size", "keep", "names"),
    [
        (lambda: linears(3, WIDTH), 9999, (), ["model"]),
        (lambda: linears(6, WIDTH), 4 * 1088, (), ["0 to 2", "3 to 5"]),
        (lambda: nn.Sequential(linears(2, WIDTH), linear()), 2200, (), ["0", "1"]),
        (lambda: nn.Sequential(nn.MultiheadAttention(WIDTH, 2), linear()), 0, (), ["0", "1"]),
        (lambda: Block(linear(), linear()), 1100, (), ["model", "inner.0", "inner.1"]),
        (tied, 1100, (), ["0.weight", "1", "2"]),
        (twice, 1100, (), ["0", "1"]),
        (views, 1100, (), ["0", "0.weight", "1"]),
        # what is apart shares a unit with nothing, and is not cut
        (
            lambda: nn.Sequential(linear(), linears(2, WIDTH), linear()),
            8 * 1088,
            ["1"],
            ["0", "1", "2"],
        ),
    ],
)
def test_what_a_unit_is(make, size, keep, names, tmp_path):
    assert list(units_of(make(), size, tmp_path, keep=keep)) == names


def test_what_no_forward_brackets_stays(tmp_path):
    model = nn.Sequential(Block(linear()), linear())
    with pytest.raises(PagingError, match=r"beside 512 B that stay") as caught:
        plan_paging(model, "cpu", 1, budget=1, host=tmp_path)
    assert caught.value.minimum_bytes == rounded(LINEAR_BYTES) + 512


LEAVES = st.builds(nn.Linear, st.integers(1, 40), st.integers(1, 9))
TREES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4).map(lambda each: nn.Sequential(*each)),
        st.lists(inside, max_size=3).map(lambda each: Block(*each)),
    ),
    max_leaves=8,
)


@settings(FIXTURES_ONCE, max_examples=40)
@given(tree=TREES, n_bytes=st.integers(0, 4000), tie=st.booleans())
def test_every_tensor_is_in_one_unit_and_none_beyond_the_size(tree, n_bytes, tie, tmp_path):
    layers = [each for each in tree.modules() if isinstance(each, nn.Linear)]
    if tie and layers:
        layers[-1].bias = layers[0].bias
    units = units_of(tree, n_bytes, tmp_path)
    # Each tensor begins at 256 bytes, and each unit at 512.
    least_bytes = sum(rounded(each.nbytes, 256) for each in tree.parameters())
    assert least_bytes <= sum(units.values()) < least_bytes + 512 * max(1, len(units))
    assert all(each % UNIT_ALIGNMENT_BYTES == 0 for each in units.values())
    values = {name: each.clone() for name, each in tree.state_dict().items()}
    with page(tree, "cpu", f"{n_bytes}B", host=tmp_path):
        assert_equal(dict(tree.state_dict()), values)
        assert all(each.data_ptr() % 16 == 0 for each in tree.parameters())
