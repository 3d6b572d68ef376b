"""CUDA graphs: what is refused while one is captured, and what its replays hand out."""

import pytest
import torch
from torch import nn

from tenure import NewDisposeScope, TenureError, dispose
from tenure.adaptive import NoBatchsizeCache, batch, memory_budget, step
from tenure.paging import page


def captured(rig, work):
    """The graph of `work`, which must not break its capture, and what `work` returned."""
    graph = rig.module.CUDAGraph()
    with rig.module.graph(graph):
        result = work()
    return graph, result


def refused(call):
    with pytest.raises(TenureError) as caught:
        call()
    return str(caught.value)


def enter(block):
    with block:
        pass


@pytest.mark.parametrize("what", ["memory_budget", "step", "paged"])
def test_what_would_break_a_capture_is_refused_and_the_capture_goes_on(rig, tell, what):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).to(rig.device)
    paged = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).requires_grad_(False)
    x, total = torch.ones(4, 32, device=rig.device), torch.zeros(4, 32, device=rig.device)
    with page(paged, rig.device, budget="9KiB"):
        paged(x)
        calls = {
            "memory_budget": lambda: enter(memory_budget("1GiB", rig.device)),
            "step": lambda: step(lambda b: model(b).mean(), x, cache_type=NoBatchsizeCache),
            "paged": lambda: paged(x),
        }

        def work():
            with torch.no_grad():
                total.add_(x)
            message = refused(calls[what])
            with torch.no_grad():
                total.add_(x)
            return message

        graph, message = captured(rig, work)
        before = total.sum().item()
        graph.replay()
        tell(message[:110])
        assert total.sum().item() == before + 2 * x.numel()


def test_an_out_of_memory_error_in_a_capture_is_handed_on(rig, tell):
    attempts = []

    @batch(initial_batchsize=8, cache_type=NoBatchsizeCache)
    def fails(size):
        attempts.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def work():
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB"):
            fails()
        return torch.ones(2, device=rig.device) * 2

    graph, result = captured(rig, work)
    graph.replay()
    tell(f"attempts {attempts}; the replay gives {result.tolist()}")
    assert attempts == [8]
    assert result.tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_disposing_of_an_output_of_reduce_overhead_leaves_the_next_replay_right(rig, tell):
    rig.needs_a_gpu("inductor makes no code for the simulated device")

    @torch.compile(mode="reduce-overhead")
    def double(x):
        return x * 2 + 1

    sums = []
    for number in range(7):
        x = torch.full((1024,), float(number), device=rig.device)
        torch.compiler.cudagraph_mark_step_begin()
        with NewDisposeScope():
            out = double(x)
            sums.append(out.sum().item())
        if number > 3:  # from its second replay on the graph hands the same tensor out
            with pytest.warns(UserWarning, match="hands this very tensor out"):
                dispose(out)
    tell(f"{sums}")
    assert sums == [1024.0 * (2 * number + 1) for number in range(7)]
