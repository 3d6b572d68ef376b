"""How a model is cut: what a unit is, what it shares, how large it is and where tensors lie."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tenure.paging._model import UNIT_ALIGNMENT_BYTES, TensorTable, UnitSize, cut, sizes_with_own
from tenure.paging._model._tensors import EXTENT_ALIGNMENT_BYTES

WIDTH = 16
LINEAR_BYTES = 4 * WIDTH * (WIDTH + 1)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def linears(n):
    return nn.Sequential(*[linear() for _ in range(n)])


def cut_to(model, n_bytes, *, merge_bytes=0, apart=()):
    table = TensorTable(model)
    fits = UnitSize(n_bytes).fits(table)
    return cut(model, table, fits, merge_bytes=merge_bytes, apart=apart)


def names_of(pieces):
    return [unit.name for unit in pieces.units]


def tensors_of(unit):
    return sorted(host.name for host in unit.tensors)


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


def test_a_model_that_fits_is_one_unit_that_its_forward_needs():
    model = linears(3)
    pieces = cut_to(model, 3 * LINEAR_BYTES)
    assert names_of(pieces) == ["model"]
    assert pieces.needs == {model: pieces.units}


def test_one_that_does_not_fit_is_cut_into_its_children():
    model = nn.Sequential(linears(2), linear())
    assert names_of(cut_to(model, 2 * LINEAR_BYTES)) == ["0", "1"]
    assert names_of(cut_to(model, LINEAR_BYTES)) == ["0.0", "0.1", "1"]


def test_a_module_without_children_is_never_cut():
    assert names_of(cut_to(linears(2), 0)) == ["0", "1"]


def test_attention_reads_the_weights_of_its_children_and_is_never_cut():
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, 2), linear())
    pieces = cut_to(model, 0)
    assert names_of(pieces) == ["0", "1"]
    assert "0.out_proj.weight" in tensors_of(pieces.units[0])


def test_what_a_cut_module_has_itself_is_a_loose_unit_that_no_forward_brackets():
    model = Block(linear(), linear())
    pieces = cut_to(model, LINEAR_BYTES)
    assert [(unit.name, unit.is_loose) for unit in pieces.units] == [
        ("model", True),
        ("inner.0", False),
        ("inner.1", False),
    ]
    assert model not in pieces.needs
    assert tensors_of(pieces.units[0]) == ["scale"]


def test_modules_that_would_leave_tensors_that_none_brackets_are_known_by_their_bytes():
    inner = Block(linear())
    model = nn.Sequential(inner, linear())
    assert sizes_with_own(model, TensorTable(model)) == {LINEAR_BYTES + 12}


def test_a_list_is_never_called_and_its_children_lead_its_unit():
    layers = nn.ModuleList([linear(), linear()])
    pieces = cut_to(layers, 2 * LINEAR_BYTES)
    assert names_of(pieces) == ["model"]
    assert pieces.needs == dict.fromkeys(layers, pieces.units)


def test_tied_tensors_are_a_unit_of_their_own_that_each_of_their_modules_needs():
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), linear(), linear())
    model[2].weight = model[0].weight
    pieces = cut_to(model, LINEAR_BYTES)
    tied, *_ = pieces.needs[model[0]]
    assert (tied.name, tensors_of(tied)) == ("0.weight", ["0.weight"])
    assert pieces.needs[model[0]] == [tied]
    assert [unit.name for unit in pieces.needs[model[2]]] == ["2", "0.weight"]
    assert pieces.units.count(tied) == 1


def test_a_module_under_two_names_is_cut_once():
    layer = linear()
    pieces = cut_to(nn.Sequential(layer, linear(), layer), LINEAR_BYTES)
    assert names_of(pieces) == ["0", "1"]


def test_views_of_one_storage_are_in_one_extent_at_their_distance():
    model = linears(2)
    both = torch.randn(2, WIDTH, WIDTH)
    model[0].weight, model[1].weight = (nn.Parameter(each) for each in both)
    table = TensorTable(model)
    [extent] = [each for each in table.extents_of([model[0]]) if len(each.tensors) == 2]
    assert extent in table.extents_of([model[1]])
    first, second = (table.hosts[id(layer.weight)] for layer in model)
    assert extent.tensors == [first, second]
    assert second.at_bytes - first.at_bytes == 4 * WIDTH * WIDTH
    assert extent.n_bytes == both.nbytes


def test_neighbours_in_order_share_a_unit_up_to_a_size_and_evenly():
    pieces = cut_to(linears(6), 0, merge_bytes=4 * LINEAR_BYTES)
    assert names_of(pieces) == ["0 to 2", "3 to 5"]
    model = linears(4)
    merged = cut_to(model, 0, merge_bytes=2 * LINEAR_BYTES)
    assert names_of(merged) == ["0 to 1", "2 to 3"]
    assert merged.needs == {layer: [merged.units[i // 2]] for i, layer in enumerate(model)}


def test_what_is_apart_shares_a_unit_with_nothing_and_is_not_cut():
    model = nn.Sequential(linear(), linears(2), linear())
    pieces = cut_to(model, 0, merge_bytes=8 * LINEAR_BYTES, apart=[model[1]])
    assert names_of(pieces) == ["0", "1", "2"]


def test_a_number_of_parameters_is_a_size_as_well():
    model = linears(2)
    n_parameters = sum(each.numel() for each in model.parameters())
    for most, expected in ((n_parameters + 1, ["model"]), (n_parameters, ["0", "1"])):
        table = TensorTable(model)
        assert names_of(cut(model, table, UnitSize(n_parameters=most).fits(table))) == expected


LEAVES = st.builds(nn.Linear, st.integers(1, 40), st.integers(1, 9))
TREES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4).map(lambda each: nn.Sequential(*each)),
        st.lists(inside, max_size=3).map(lambda each: Block(*each)),
    ),
    max_leaves=8,
)


@given(
    tree=TREES,
    n_bytes=st.integers(0, 4000),
    merge_bytes=st.integers(0, 4000),
    tie=st.booleans(),
)
def test_every_tensor_is_in_one_unit_aligned_and_beside_no_other(tree, n_bytes, merge_bytes, tie):
    layers = [each for each in tree.modules() if isinstance(each, nn.Linear)]
    if tie and layers:
        layers[-1].bias = layers[0].bias
    table = TensorTable(tree)
    pieces = cut(tree, table, UnitSize(n_bytes).fits(table), merge_bytes=merge_bytes)
    found = [host for unit in pieces.units for host in unit.tensors]
    assert sorted(map(id, found)) == sorted(map(id, table.hosts.values()))
    for unit in pieces.units:
        end = 0
        for extent, start in unit.starts():
            assert start >= end
            assert start % EXTENT_ALIGNMENT_BYTES == 0
            end = start + extent.n_bytes
            for host in extent.tensors:
                assert host.unit is unit
                assert unit.spans_of([host]) == [(start, start + extent.n_bytes)]
                assert start <= host.at_bytes <= end - host.tensor.nbytes
                assert (host.at_bytes - host.tensor.storage_offset() * 4) % 16 == 0
        assert end <= unit.n_bytes < end + UNIT_ALIGNMENT_BYTES + EXTENT_ALIGNMENT_BYTES
        assert unit.n_bytes % UNIT_ALIGNMENT_BYTES == 0
    led = {id(unit) for units in pieces.needs.values() for unit in units}
    assert all(unit.is_loose or id(unit) in led for unit in pieces.units)
