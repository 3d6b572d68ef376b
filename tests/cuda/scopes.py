"""Scopes on a device: the bytes go when the block ends, and gradients stay what they were."""

import copy

import torch
from torch import nn

from tenure import DisposedTensorError, NewDisposeScope, is_disposed

from .rig import MIB, check, raised, same_bits


@check()
def scope_frees_bytes(rig):
    """Tensors that a block made are freed at its end, to the byte, also if something holds them."""
    at_rest, escaped = rig.allocated(), []
    with NewDisposeScope("outer"):
        with NewDisposeScope("inner") as scope:
            escaped.extend(rig.bytes(3 * MIB) for _ in range(10))
            kept = scope.move_to_outer(rig.bytes(5 * MIB))
            inside = rig.allocated() - at_rest
        left = rig.allocated() - at_rest
        assert (inside, left) == (35 * MIB, 5 * MIB), (inside, left)
        assert all(map(is_disposed, escaped))
        assert not is_disposed(kept)
    assert rig.allocated() == at_rest
    error = raised(DisposedTensorError, lambda: escaped[0] + 1)
    return {"freed_bytes": inside, "error": str(error).partition("\n")[0][:90]}


@check()
def backward_after_disposal(rig):
    """Training in scopes, with a backward pass after disposal, has the bits of plain training."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    x, target = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
    model(x)
    start = copy.deepcopy(model)

    def train(scoped):
        model = copy.deepcopy(start).to(rig.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        inputs, labels, escaped = x.to(rig.device), target.to(rig.device), []
        for _ in range(5):
            optimizer.zero_grad()
            if scoped:
                with NewDisposeScope() as scope:
                    hidden = model[:3](inputs)
                    escaped.append(hidden)
                    loss = nn.functional.cross_entropy(model[3:](hidden), labels)
                    loss = scope.move_to_outer(loss)
                assert is_disposed(hidden)
            else:
                loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        return [*model.state_dict().values()]

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        assert same_bits(train(True), train(False))
    finally:
        torch.backends.cudnn.deterministic = deterministic
    return {"steps": 5, "same_bits": True}
