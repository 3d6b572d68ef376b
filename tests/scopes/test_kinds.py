"""Every kind of tensor: sparse, quantized, nested, complex, meta, fake, subclasses and wrappers.

Each is made in a scope, is the scope's wherever torch lets the scope see it, never breaks the count
of bytes, and is loud once disposed.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tenure import DisposedTensorError, NewDisposeScope, attach_to_scope, is_disposed
from tenure.profiler import holders

# Sparse, quantized and nested tensors announce that they are beta; that is torch's to say.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta|prototype|quantiz|nested).*:UserWarning",
    "ignore:.*quantiz.*:DeprecationWarning",
)


class Labelled(Tensor):
    """A plain subclass: its results are of its class."""


def two(*size: int) -> Tensor:
    """A wrapper subclass: an opaque outside, and the data in inner tensors."""
    return TwoTensor(torch.ones(*size), torch.ones(*size))


def jagged() -> Tensor:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2, 3)


class Kind(NamedTuple):
    """How to make a tensor, how errors spell it, and the bytes of all that a scope owns then."""

    make: Callable[[], Tensor]
    dtype: str
    n_bytes: int


DENSE = torch.eye(3)
KINDS = {
    "expanded": Kind(lambda: torch.ones(1, 3).expand(4, 3), "float32[4, 3]", 12),
    "conjugate": Kind(lambda: torch.ones(2, dtype=torch.complex64).conj(), "complex64[2]", 16),
    "sparse coo": Kind(lambda: DENSE.to_sparse(), "float32[3, 3]", 60),
    "sparse csr": Kind(lambda: DENSE.to_sparse_csr(), "float32[3, 3]", 92),
    "mkldnn": Kind(lambda: DENSE.to_mkldnn(), "float32[3, 3]", 0),  # opaque
    "quantized": Kind(
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "qint8[2, 3]", 6
    ),
    "jagged": Kind(jagged, "float32[2, j", 60),
    "meta": Kind(lambda: torch.ones(2, 3, device="meta"), "float32[2, 3]", 0),
    "inference": Kind(inference, "float32[2, 3]", 24),
    "fake": Kind(fake, "float32[2, 3]", 0),
    "subclass": Kind(lambda: torch.ones(2, 3).as_subclass(Labelled) + 1, "float32[2, 3]", 24),
    "wrapper result": Kind(lambda: two(2, 3) + 1, "float32[2, 3]", 48),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_scope_takes_every_kind_counts_its_bytes_and_makes_it_loud(kind, nobody_searches):
    with NewDisposeScope("step") as scope:
        made = kind.make()
        assert made in scope
        assert scope.live_bytes == kind.n_bytes
        moved = scope.move_to_outer(kind.make())
    assert is_disposed(made)
    assert repr(made).startswith(f"<DisposedTensor {kind.dtype}")
    for use in (lambda t: t + 1, lambda t: t.shape, lambda t: t.to_dense(), lambda t: t.detach()):
        with pytest.raises(DisposedTensorError, match="disposed when <DisposeScope 'step'>"):
            use(made)
    assert not is_disposed(moved)
    assert moved.detach().shape == moved.shape


def test_what_holds_a_disposed_tensor_is_found_of_kinds_without_a_storage_too():
    with NewDisposeScope("step"):
        kept = {name: KINDS[name].make() for name in ("sparse coo", "jagged", "fake")}
    for name in kept:
        assert any(chain.endswith(f"kept[{name!r}]") for chain in holders(kept[name])), name


UNSEEN = {
    "torch.Tensor(2)": lambda: torch.Tensor(2),
    "Parameter": lambda: nn.Parameter(torch.ones(1)),
    "from_numpy": lambda: torch.from_numpy(torch.ones(1).numpy()),
    "nested strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
    "vmap": lambda: torch.vmap(torch.sin)(torch.ones(3)),
    "wrapper": lambda: two(2),
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN)
def test_what_torch_shows_to_no_scope_is_no_scopes_until_attached(make, nobody_searches):
    with NewDisposeScope("step") as scope:
        unseen = make()
        assert unseen not in scope
        assert scope.live_bytes >= 0
    assert type(unseen).__name__ != "DisposedTensor"

    with NewDisposeScope("step"):
        attached = attach_to_scope(make())
    assert is_disposed(attached)
    with pytest.raises(DisposedTensorError):
        attached + 1


def test_a_list_of_numbers_and_a_tuple_of_a_subclass_are_returned_as_without_a_scope():
    with NewDisposeScope() as scope:
        made = torch.tensor([[0.5, 1.5], [2.5, 3.5]])
        assert made.tolist() == [[0.5, 1.5], [2.5, 3.5]]
        parts = made.as_subclass(Labelled).split(1)
        assert [type(part) for part in parts] == [Labelled, Labelled]
        assert all(part in scope for part in parts)
