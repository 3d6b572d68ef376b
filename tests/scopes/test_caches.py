"""Caches that a block fills by the way: loud afterwards, and whole when filled in persist()."""

import copy
import functools
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from tenure import DisposedTensorError, NewDisposeScope, is_disposed, persist


class Rotary(nn.Module):
    """Keeps its table as a plain attribute, made at the first call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1]).cos()
        return x * self.table


def test_an_attribute_filled_in_a_block_is_refused_with_the_place_of_both():
    module, x = Rotary(), torch.ones(3)
    with NewDisposeScope("first batch", capture="site"):
        module(x)
    with pytest.raises(DisposedTensorError) as caught:
        module(x)
    message = str(caught.value)
    assert "disposed when <DisposeScope 'first batch'> (opened at " in message
    assert "it was created at tests/scopes/test_caches.py:" in message
    assert message.endswith(
        "Rotary.table still holds it: store detach_from_scope(...) there, or make it inside "
        "persist(), if it is to outlive the block."
    )


def test_caches_of_functions_and_properties_are_named_and_whole_if_filled_in_persist():
    @functools.cache
    def mask(n: int) -> Tensor:
        return torch.ones(n, n).tril()

    distribution = Categorical(logits=torch.zeros(3))
    with NewDisposeScope():
        mask(2)
        distribution.probs  # noqa: B018  # reading it fills the cache
    with pytest.raises(
        DisposedTensorError, match=r"lru_cache of .*mask\[2\] still holds it: store"
    ):
        mask(2) + 1
    with pytest.raises(DisposedTensorError, match=r"distribution\.probs still holds it: store"):
        distribution.probs + 1
    mask.cache_clear()
    with NewDisposeScope():
        with persist():
            mask(2)
        assert (mask(2) + 1).sum().item() == 7
    assert not is_disposed(mask(2))


def test_a_list_item_is_named_and_a_variable_of_a_running_function_is_not():
    history: list[Tensor] = []
    with NewDisposeScope():
        history.append(torch.ones(2))
        loss = torch.ones(3)
    with pytest.raises(DisposedTensorError, match=r"history\[0\] still holds it: store detach"):
        history[0].sum()
    with pytest.raises(DisposedTensorError, match=r"closed\. Keep it with move_to_outer\(\)"):
        loss.sum()


def test_the_holder_is_looked_for_once_and_its_failure_hides_nothing(monkeypatch):
    def search(tensors: list[Tensor]) -> list[list[object]]:
        searches.append(tensors)
        raise MemoryError

    searches: list[list[Tensor]] = []
    monkeypatch.setattr("tenure.scopes._disposed.find_holders", search)
    with NewDisposeScope():
        x = torch.ones(2)
    # asking whether there is an attribute searches nothing
    assert not hasattr(x, "no_such_name")
    assert searches == []
    for _ in range(2):
        with pytest.raises(DisposedTensorError, match="Keep it with"):
            x + 1
    assert len(searches) == 1


def test_what_is_loaded_in_a_block_is_the_blocks():
    buffer = io.BytesIO()
    torch.save({"b": [torch.zeros(1)]}, buffer)
    buffer.seek(0)
    with NewDisposeScope() as scope:
        loaded = torch.load(buffer)
        copied = scope.detach(copy.deepcopy(loaded))
    assert is_disposed(loaded["b"][0])
    assert copied["b"][0].tolist() == [0]
