"""The search for owners, on the CPU, whose tensors come in more kinds than those of a device.

By a private name, because a Courtesy leaves the CPU alone.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenure.profiler._courtesy import _inventory


@pytest.fixture(autouse=True)
def _cpu_counts(monkeypatch):
    monkeypatch.setattr(_inventory, "NO_ACCELERATOR", frozenset({"meta"}))


def holdings():
    return {held.storage._cdata: held for held in _inventory.take_inventory()}


def held_of(t):
    return holdings()[t.untyped_storage()._cdata]


def unseen_since(make):
    """What `make` gives back, and the storages made by it of which an owner was not seen."""
    before = holdings()
    made = make()
    fresh = {key: held for key, held in holdings().items() if key not in before}
    assert fresh
    return made, [held for held in fresh.values() if held.n_unseen]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, y)
        ctx.kept = [x + 1]
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def leaf(*size):
    return torch.ones(*size, requires_grad=True)


def stepped():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 1, 6, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


KINDS = {
    "plain": lambda: torch.ones(4),
    "views": lambda: [t := torch.ones(4, 4), t[1:], t[1:].t(), t.detach(), t.view(-1)],
    "views of a parameter": lambda: [p := nn.Parameter(torch.ones(4)), p[1:], p.detach()],
    "gradients and optimizer": stepped,
    "custom function": lambda: Doubled.apply(leaf(4) * 3),
    "checkpoint": lambda: checkpoint(nn.Linear(4, 4), leaf(2, 4), use_reentrant=False).sum(),
    "reentrant": lambda: checkpoint(nn.Linear(4, 4), leaf(2, 4), use_reentrant=True).sum(),
    "node": lambda: (leaf(4) * leaf(4)).grad_fn,
    "storage": lambda: torch.UntypedStorage(16),
    "numpy": lambda: [t := torch.ones(4), t.numpy()],
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "inference": lambda: torch.inference_mode()(lambda: torch.ones(3) * 2)(),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantiz).*")
@pytest.mark.parametrize("kind", KINDS)
def test_every_owner_of_every_kind_is_seen(kind):
    made, unseen = unseen_since(KINDS[kind])
    assert unseen == []
    del made


def test_a_storage_lists_its_tensors_and_the_nodes_that_saved_them():
    w = leaf(4)
    y = w.view(2, 2) * w.exp().view(2, 2)
    held = held_of(w)
    assert any(t is w for t in held.tensors.values())
    names = {type(node).__name__ for node in held.nodes.values()}
    assert names == {"AccumulateGrad", "MulBackward0"}  # exp() saved its result instead
    del y


def test_the_parts_of_a_sparse_tensor_stay():
    t = torch.eye(3).to_sparse()
    going, stays = _inventory.split([held_of(t._values())])
    assert going == []
    assert ["a sparse tensor" in stay.reason for stay in stays] == [True]


EXPORTS = {
    "dlpack": lambda: [t := torch.ones(4), torch.utils.dlpack.to_dlpack(t)],
    "a change to a view": lambda: changed_view(),
}


def changed_view():
    w = leaf(3)
    y = w * 2
    y[0] *= w[1]
    return y


@pytest.mark.parametrize("name", EXPORTS)
def test_an_owner_that_cannot_be_seen_is_counted(name):
    made, unseen = unseen_since(EXPORTS[name])
    assert [held.n_unseen for held in unseen] == [1]
    del made


def test_no_checkpoint_is_recomputed_by_looking():
    calls = []

    def body(x):
        calls.append(1)
        return x.exp()

    loss = checkpoint(body, leaf(4), use_reentrant=False).sum()
    holdings()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2
