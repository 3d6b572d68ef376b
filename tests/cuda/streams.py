"""Side streams and threads."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tenure import NewDisposeScope, current_scope, is_disposed
from tenure.paging import page
from tests.paging.models import SumOnSideStream

from .rig import MIB, check, parameter_bytes


@check()
def record_stream_of_weights(rig):
    """A paged weight stays until the stream that was recorded has read it."""
    width = rig.pick(1024, 64)
    side = rig.module.Stream()
    model = SumOnSideStream(rig.module, side, width=width, n_layers=12)
    x = torch.randn(rig.pick(2048, 8), width, device=rig.device)
    with torch.no_grad():
        weights = [layer.weight.to(rig.device) for layer in model.layers]
        expected = sum(x @ weight for weight in weights).cpu()
        del weights
        with page(model, rig.device, budget=parameter_bytes(model) // 3):
            for number in range(6):
                assert torch.equal(model(x).cpu(), expected), f"pass {number}"
    return {"passes": 6, "bytes": parameter_bytes(model)}


@check()
def scope_beside_a_stream(rig):
    """A tensor that a side stream still reads is disposed: its bytes are not given out early."""
    side, n = rig.module.Stream(), rig.pick(64 * MIB, MIB)
    x = torch.ones(n // 4, device=rig.device)
    sums = []
    for number in range(8):
        with NewDisposeScope() as scope:
            made = x * (number + 1)
            side.wait_stream(rig.module.current_stream())
            with rig.module.stream(side):
                total = scope.move_to_outer(made.mul(2).add(1).sum(dtype=torch.float64))
            made.record_stream(side)
        assert is_disposed(made)
        # would be put where `made` was
        torch.full((n // 4,), -1.0, device=rig.device)
        rig.module.current_stream().wait_stream(side)
        sums.append(total.item())
    assert sums == [(n // 4) * (2.0 * (number + 1) + 1) for number in range(8)], sums
    return {"rounds": 8}


@check()
def paged_on_a_side_stream(rig):
    """A paged model that is called on a side stream computes the same bits."""
    width = rig.pick(1024, 64)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)]).eval()
    x, side = torch.randn(64, width, device=rig.device), rig.module.Stream()
    with torch.inference_mode():
        expected = copy.deepcopy(model).to(rig.device)(x).cpu()
        with page(model, rig.device, budget=parameter_bytes(model) // 3):
            for number in range(6):
                stream = side if number % 2 else rig.module.current_stream()
                stream.wait_stream(rig.module.current_stream())
                with rig.module.stream(stream):
                    y = model(x)
                rig.module.current_stream().wait_stream(stream)
                assert torch.equal(y.cpu(), expected), f"pass {number}"
    return {"passes": 6}


@check()
def two_threads(rig):
    """Two threads have scopes of their own, and call one paged model in turns."""
    width = rig.pick(512, 32)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).eval()
    inputs = [torch.randn(16, width, device=rig.device) for _ in range(2)]
    turns = threading.Barrier(2)
    with torch.inference_mode():
        plain = copy.deepcopy(model).to(rig.device)
        expected = [plain(x).cpu() for x in inputs]
        del plain

    def work(index):
        assert current_scope() is None
        turns.wait()
        for number in range(10):
            with NewDisposeScope(f"{index}") as scope, torch.inference_mode():
                y = model(inputs[index])
                z = y * 2
                assert torch.equal(y.cpu(), expected[index]), (index, number)
                assert z in scope
            assert is_disposed(z)

    with page(model, rig.device, budget=parameter_bytes(model) // 2), ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    return {"passes": 20}
