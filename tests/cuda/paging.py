"""Paging by a real allocator, a real link and a real driver."""

import copy
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, add_listener, batch, step
from tenure.paging import PagingWarning, load_paged, page

from .rig import MIB, Skipped, check, off_by, parameter_bytes, same_bits


class Mean(nn.Module):
    """A layer of one weight that reads all of it."""

    def __init__(self, n_bytes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_bytes // 4), requires_grad=False)

    def forward(self, x):
        return x + self.weight.mean()


class Layer(nn.Module):
    """As in a transformer, without attention."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def layers(n_layers, width=256):
    return nn.Sequential(*[Layer(width) for _ in range(n_layers)])


@check()
def paged_bytes(rig):
    """The memory of a paged model on the device stays within its budget."""
    figures = {}
    # on a GPU of either size; the simulated device keeps the weights in the host's memory
    for n_layers, layer_mib, budget_mib in rig.pick(
        ((40, 7, 200), (40, 11.5, 300)), ((12, 7, 60),)
    ):
        model = nn.Sequential(*[Mean(int(layer_mib * MIB)) for _ in range(n_layers)]).eval()
        x = torch.ones(8, device=rig.device)
        rig.tidy()
        reserved, allocated = rig.reserved(), rig.allocated()
        with torch.inference_mode(), page(model, rig.device, budget=f"{budget_mib}MiB"):
            for _ in range(2):
                model(x).cpu()
            reserved, allocated = rig.reserved() - reserved, rig.allocated() - allocated
        figures[f"reserved_of_{budget_mib}_MiB"] = reserved / MIB
        # up to so much is not split off
        assert allocated <= (budget_mib + 1) * MIB, allocated / MIB
        # a segment of activations in each pool
        assert reserved <= (budget_mib + 22) * MIB, reserved / MIB
    return figures


@check()
def paged_inference(rig):
    """A paged model computes the bits of the whole one, in three types."""
    figures = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = layers(rig.pick(8, 3)).to(dtype).eval()
        x = torch.randn(16, 256).to(rig.device, dtype)
        with torch.inference_mode():
            whole = copy.deepcopy(model).to(rig.device)(x).cpu()
            with page(model, rig.device, budget=parameter_bytes(model) // 3) as handle:
                paged = [model(x).cpu() for _ in range(3)]
                figures[str(dtype)] = handle.report().bytes_per_pass
        assert figures[str(dtype)] > 0
        assert all(torch.equal(each, whole) for each in paged), dtype
    return figures


def _train(rig, model):
    """Losses of three steps, gradients of the first, and the parameters at the end."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).double().to(rig.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    losses, first = [], []
    for number in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if number == 0:
            first = [parameter.grad.detach().cpu().clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first, [parameter.detach().cpu().clone() for parameter in model.parameters()]


def _trained_paged(rig, **options):
    start = layers(rig.pick(8, 3)).double()
    whole = _train(rig, copy.deepcopy(start).to(rig.device))
    rig.tidy()
    rig.reset_peak()
    before = rig.allocated()
    with page(
        start, rig.device, budget=parameter_bytes(start) // 2, training=True, **options
    ) as handle:
        paged = _train(rig, start)
        report = handle.report()
        peak = rig.peak() - before
    assert report.bytes_per_pass > 0
    assert paged[0][0] == whole[0][0], "the first loss"
    assert same_bits(paged[1], whole[1]), f"gradients are off by {off_by(paged[1], whole[1])}"
    difference = off_by(paged[2], whole[2])
    assert difference < 1e-12, difference
    return {"off_by_after_3_steps": difference, "peak_bytes": peak, "faults": report.faults}


@check()
def paged_training(rig):
    """The first loss and gradients have the same bits; steps on the host round as they will."""
    return _trained_paged(rig)


@check()
def paged_activations(rig):
    return _trained_paged(rig, activations="host")


@check(limit_s=120, sim={"allocator": "exact"})
def paged_auto(rig):
    """`budget="auto"` gives memory back when computation needs it, and takes it again."""
    n_layers, width = rig.pick((24, 1024), (8, 256))
    model = layers(n_layers, width).eval()
    x = torch.randn(8, width, device=rig.device)
    weights = parameter_bytes(model)
    with torch.inference_mode():
        whole = copy.deepcopy(model).to(rig.device)
        expected = whole(x).cpu()
        del whole
        held = []

        # what one operation needs more than the pager leaves free, a retry asks it for
        @batch(initial_batchsize=weights // 4 // MIB, cache_type=NoBatchsizeCache)
        def taken(n_mib):
            return rig.bytes(n_mib * MIB)

        with rig.limited(3 * weights // 4), page(model, rig.device, budget="auto") as handle:
            few, many = rig.pick((6, 30), (3, 12))
            for n_passes, takes in ((few, False), (few, True), (many, False)):
                kept = taken() if takes else None
                for _ in range(n_passes):
                    assert torch.equal(model(x).cpu(), expected)
                held.append(handle.report().resident_bytes)
                del kept
                rig.tidy()
                rig.reset_peak()
    assert held[1] < held[0], held
    assert held[2] > held[1], held
    return {"weight_bytes": weights, "resident_bytes": held}


@check()
def paged_retry(rig):
    """A step that runs out of memory gets memory of the pager's; its gradients are the batch's."""
    width, n_samples = rig.pick(512, 64), rig.pick(16384, 512)
    model = layers(rig.pick(8, 3), width).double()
    x = torch.randn(n_samples, width, dtype=torch.float64, device=rig.device)
    whole = copy.deepcopy(model).to(rig.device)
    whole(x).square().mean().backward()
    truth = [parameter.grad.cpu() for parameter in whole.parameters()]
    del whole
    events = []
    add_listener(events.append)
    weights = parameter_bytes(model)
    options = {"model": model, "cache_type": NoBatchsizeCache}
    with page(model, rig.device, budget=int(0.9 * weights), training=True):
        with rig.limited(rig.pick(512, 3) * MIB):
            result = step(lambda x: model(x).square().mean(), x, **options)
        difference = off_by([parameter.grad for parameter in model.parameters()], truth)
    kinds = [event.kind for event in events]
    assert result.attempts > 1, result
    assert difference < 1e-10, difference
    return {"micro_batch": result.micro_batch, "events": kinds, "off_by": difference}


@check()
def paged_from_disk(rig):
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise Skipped("safetensors is missing") from None
    whole = layers(8, 512).eval()
    x = torch.randn(16, 512, device=rig.device)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "model.safetensors"
        save_file(whole.state_dict(), path)
        with torch.device("meta"):
            model = layers(8, 512).eval()
        budget = parameter_bytes(whole) // 3
        expected = copy.deepcopy(whole).to(rig.device)(x)
        with load_paged(model, path, rig.device, budget=budget) as handle:
            for _ in range(3):
                assert torch.equal(model(x), expected)
            report = handle.report()
        # a folder of tenure's own, for a model that is in memory
        with page(whole, rig.device, budget=budget, host=Path(folder)):
            assert torch.equal(whole(x), expected)
    return {"bytes_per_pass": report.bytes_per_pass, "pinned_bytes": report.pinned_bytes}


@check(limit_s=150)
def paged_compiled(rig):
    """Compiled blocks of a paged model: the results of the compiled plain model, in one graph."""
    torch._dynamo.config.error_on_recompile = False
    backend = rig.pick("inductor", "eager")
    figures = {}
    for trains in rig.pick((False, True), (True,)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        start = layers(rig.pick(6, 3))
        x = torch.randn(16, 256, device=rig.device)

        def run(model, trains=trains, x=x):
            for block in model:
                block.compile(backend=backend)
            outputs = []
            for _ in range(3):
                model.zero_grad()
                with torch.set_grad_enabled(trains):
                    y = model(x)
                    if trains:
                        y.square().mean().backward()
                outputs.append(y.detach().cpu())
            gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            return outputs + gradients

        eager = copy.deepcopy(start).to(rig.device)(x).detach().cpu()
        whole = run(copy.deepcopy(start).to(rig.device))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        budget = parameter_bytes(start) // 2
        with page(start, rig.device, budget=budget, training=trains):
            paged = run(start)
        both = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        name = "training" if trains else "inference"
        figures[f"{name}_off_by"] = off_by(paged, whole)
        figures[f"{name}_graphs"] = [graphs, both - graphs]
        assert figures[f"{name}_off_by"] < 1e-5, figures
        assert off_by([paged[0]], [eager]) < 1e-3
        assert len(paged) == len(whole)
        assert both - graphs <= graphs, figures
    return figures


class _FailsToPin:
    """A runtime whose registrations truly fail: the memory is pinned already."""

    def __init__(self, runtime):
        self._runtime = runtime
        self.codes = []

    def cudaHostRegister(self, address, n_bytes, flags):
        if int(self._runtime.cudaHostRegister(address, n_bytes, flags)) == 0:
            self.codes.append(int(self._runtime.cudaHostRegister(address, n_bytes, flags)))
            self._runtime.cudaHostUnregister(address)
            return self.codes[-1]
        return -1

    def __getattr__(self, name):
        return getattr(self._runtime, name)


class _FailsToUnpin(_FailsToPin):
    """A runtime whose memory is unregistered twice, of which the second time fails."""

    def cudaHostRegister(self, address, n_bytes, flags):
        return self._runtime.cudaHostRegister(address, n_bytes, flags)

    def cudaHostUnregister(self, address):
        self._runtime.cudaHostUnregister(address)
        self.codes.append(int(self._runtime.cudaHostUnregister(address)))
        return self.codes[-1]


@check()
def pinning_fails(rig):
    """Pinning, or unpinning, that fails leaves nothing to the next kernel."""
    figures = {}
    for kind in (_FailsToPin, _FailsToUnpin):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).eval()
        x = torch.randn(4, 256, device=rig.device)
        runtime = kind(rig.module.cudart())
        with (
            torch.inference_mode(),
            mock.patch.object(rig.module, "cudart", lambda runtime=runtime: runtime),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            whole = copy.deepcopy(model).to(rig.device)(x).cpu()
            with page(model, rig.device, budget="600KiB"):
                paged = model(x).cpu()
        told = [each for each in caught if issubclass(each.category, PagingWarning)]
        assert told or kind is _FailsToUnpin, "no PagingWarning"
        assert runtime.codes, kind
        assert all(runtime.codes), kind
        assert torch.equal(paged, whole)
        assert (torch.ones(4, device=rig.device) * 2).sum().item() == 8
        figures[kind.__name__] = sorted(set(runtime.codes))
    return figures


@check()
def unpaged_model(rig):
    """After the end of the block the model is a plain one, and no byte is left on the device."""
    model = layers(rig.pick(8, 3)).eval()
    before = [parameter.clone() for parameter in model.parameters()]
    rig.tidy()
    at_rest = rig.allocated()
    x = torch.randn(4, 256)
    with torch.inference_mode():
        for _ in range(3):
            with page(model, rig.device, budget=parameter_bytes(model) // 2):
                model(x.to(rig.device)).cpu()
    rig.tidy()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert same_bits(model.parameters(), before)
    # what a library keeps for its products stays
    left = rig.allocated() - at_rest
    with torch.inference_mode(), page(model, rig.device, budget=parameter_bytes(model) // 2):
        model(x.to(rig.device)).cpu()
    rig.tidy()
    assert rig.allocated() - at_rest == left
    return {"left_bytes": left}
