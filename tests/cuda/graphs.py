"""CUDA graphs: what is refused while one is captured, and what its replays hand out."""

import threading
import warnings

import torch
from torch import nn

from tenure import NewDisposeScope, TenureError, dispose
from tenure.adaptive import NoBatchsizeCache, batch, memory_budget, step
from tenure.paging import PagingError, page

from .rig import OOM_TEXT, check, raised

NO_GRAPHS = "the simulated device has no graphs"


def _captured(rig, work):
    """The graph of `work`, which must not break its capture, and what `work` returned."""
    graph = rig.module.CUDAGraph()
    with rig.module.graph(graph):
        result = work()
    return graph, result


def _linears(n_layers=4, width=32):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(n_layers)]).requires_grad_(False)


def _enter(block):
    with block:
        pass


@check(gpu_only=NO_GRAPHS)
def capture_refuses(rig):
    """A call that would break a capture is refused by name, and the capture goes on."""
    model = _linears().requires_grad_(True).to(rig.device)
    paged = _linears()
    x, total = torch.ones(4, 32, device=rig.device), torch.zeros(4, 32, device=rig.device)
    figures = {}
    with page(paged, rig.device, budget="9KiB"):
        paged(x)
        calls = {
            "memory_budget": lambda: _enter(memory_budget("1GiB", rig.device)),
            "step": lambda: step(lambda b: model(b).mean(), x, cache_type=NoBatchsizeCache),
            "paged": lambda: paged(x),
        }
        for name, call in calls.items():

            def work(call=call):
                with torch.no_grad():
                    total.add_(x)
                message = str(raised(TenureError, call))
                with torch.no_grad():
                    total.add_(x)
                return message

            graph, message = _captured(rig, work)
            before = total.sum().item()
            graph.replay()
            assert total.sum().item() == before + 2 * x.numel(), name
            figures[name] = message[:60]
    return figures


@check(gpu_only=NO_GRAPHS)
def capture_hands_errors_on(rig):
    """An out-of-memory error in a capture is not retried, and the capture goes on."""
    attempts = []

    @batch(initial_batchsize=8, cache_type=NoBatchsizeCache)
    def fails(size):
        attempts.append(size)
        raise torch.OutOfMemoryError(OOM_TEXT)

    def work():
        raised(torch.OutOfMemoryError, fails, "Tried to allocate 2.00 GiB")
        return torch.ones(2, device=rig.device) * 2

    graph, result = _captured(rig, work)
    graph.replay()
    assert attempts == [8]
    assert result.tolist() == [2.0, 2.0]
    return {"attempts": attempts}


@check(gpu_only=NO_GRAPHS)
def capture_beside_unpaging(rig):
    """A thread unpages, and collects paged models, while this one captures: nothing breaks."""
    x = torch.ones(4, 32, device=rig.device)
    total = torch.zeros(4, device=rig.device)
    paged, said, begun = _linears(), [], threading.Event()

    def unpage(handle):
        begun.wait()
        for _ in range(20):
            try:
                handle.unpage()
            except PagingError as error:
                said.append(str(error))

    with page(paged, rig.device, budget="9KiB") as handle:
        expected = paged(x).cpu()
        thread = threading.Thread(target=unpage, args=(handle,))
        thread.start()

        def work():
            begun.set()
            for _ in range(50):
                total.add_(1)
            thread.join()
            # a model that is garbage is given back when the capture is over
            total.add_(1)

        graph, _ = _captured(rig, work)
        graph.replay()
        assert total.tolist() == [51.0] * 4
        assert len(said) == 20, f"{len(said)} of 20 were refused"
        assert not handle.closed
        assert torch.equal(paged(x).cpu(), expected)
    return {"refused": len(said), "error": said[0][:90]}


@check(limit_s=120, gpu_only="inductor makes no code for the simulated device")
def dispose_of_a_replay(rig):
    """Disposing of an output of `reduce-overhead` leaves the next replay right."""

    @torch.compile(mode="reduce-overhead")
    def double(x):
        return x * 2 + 1

    sums, told = [], 0
    for number in range(7):
        x = torch.full((1024,), float(number), device=rig.device)
        torch.compiler.cudagraph_mark_step_begin()
        with NewDisposeScope():
            out = double(x)
            sums.append(out.sum().item())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dispose(out)
        told += any("hands this very tensor out" in str(each.message) for each in caught)
    assert sums == [1024.0 * (2 * number + 1) for number in range(7)], sums
    # from its second replay on the graph hands the same tensor out
    assert told >= 3, told
    return {"sums": sums, "told": told}
