"""Errors of memory as the driver and the libraries raise them: what they say, and what helps."""

import gc

import torch

from tenure.adaptive import NoBatchsizeCache, add_listener, batch, oom_info

from .rig import MIB, check, raised


def _too_large(rig):
    """The error of an allocation of 16 TiB, and the batch that a retry comes down to."""
    asked_bytes = 1 << 44
    error = raised(Exception, lambda: rig.bytes(asked_bytes))
    info = oom_info(error)
    assert info is not None, f"not recognised: {error}"
    assert (info.kind, info.device) == ("device", str(rig.device)), info
    assert info.requested_bytes is not None, info
    assert abs(info.requested_bytes / asked_bytes - 1) < 0.01, info

    @batch(initial_batchsize=1 << 18, cache_type=NoBatchsizeCache)
    def take(size):
        return len(torch.empty(size, 64 * MIB, dtype=torch.uint8, device=rig.device))

    with rig.limited(1024 * MIB):
        size = take()
    assert size < 1 << 18
    return {"kind": info.kind, "requested_bytes": info.requested_bytes, "batch": size}


check("oom_native", environment={"PYTORCH_ALLOC_CONF": "backend:native"})(_too_large)
check(
    "oom_expandable_segments",
    gpu_only="the simulated device has no expandable segments",
    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)(_too_large)


@check(
    gpu_only="the simulated device has no cudaMallocAsync",
    environment={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
)
def oom_malloc_async(rig):
    error = raised(Exception, lambda: rig.bytes(1 << 44))
    info = oom_info(error)
    assert info is not None, f"not recognised: {error}"
    assert (info.kind, info.device) == ("device", str(rig.device)), info
    return {"kind": info.kind, "requested_bytes": info.requested_bytes}


@check()
def oom_is_relieved(rig):
    """Garbage in a cycle fills the device: the real error is recognised, and the size fits."""
    seen, events = [], []

    class Holder:
        pass

    def leave_garbage():
        holder = Holder()
        holder.itself, holder.tensor = holder, rig.bytes(160 * MIB)

    @batch(initial_batchsize=150, cache_type=NoBatchsizeCache)
    def take(size):
        seen.append(size)
        return rig.bytes(size * MIB).numel() // MIB

    add_listener(events.append)
    # of its own accord the collector might free it between the error and who handles that
    gc.disable()
    with rig.limited(200 * MIB):
        leave_garbage()
        size = take()
    gc.enable()
    assert size == 150, seen
    assert seen == [150, 150], seen
    info = events[0].info
    assert (info.kind, info.device) == ("device", str(rig.device)), info
    assert info.requested_bytes == 150 * MIB, info
    return {"sizes": seen, "requested_bytes": info.requested_bytes}


@check(alone=True, gpu_only="the simulated device has no libraries")
def oom_of_a_library(rig):
    """A library's handle that finds no memory left: what it says, and whether it is recognised."""
    held, n_bytes = [], 1 << 34
    x = torch.ones(64, 64, device=rig.device)
    while n_bytes >= MIB:
        try:
            held.append(rig.bytes(n_bytes))
        except torch.OutOfMemoryError:
            n_bytes //= 2
    text, kind = "", None
    try:
        torch.linalg.solve(x @ x, x)
    except Exception as error:
        text, info = str(error), oom_info(error)
        kind = info and info.kind
    # it may have found a little
    assert kind is not None or not text, f"not recognised: {text}"
    return {"kind": kind, "text": text.partition("\n")[0][:120]}


@check()
def other_errors(rig):
    """An error of another kind is none of memory."""
    first, second = torch.ones(2, device=rig.device), torch.ones(3, device=rig.device)
    error = raised(RuntimeError, lambda: first @ second)
    assert oom_info(error) is None
    return {"text": str(error)[:80]}
