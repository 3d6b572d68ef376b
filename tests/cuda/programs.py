"""What has to run in a process of its own, for its environment or for what it does to a GPU.

`python -m tests.cuda.programs NAME cuda` prints what the function returns, as a line of JSON.
"""

import json
import random
import sys
from contextlib import ExitStack
from typing import Any

import torch

from tenure.adaptive import NoBatchsizeCache, batch, oom_info

MIB = 1 << 20
COUNTERS = (
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "inactive_split_bytes",
    "inactive_split",
    "segment",
)


def too_large(device: torch.device) -> dict[str, Any]:
    """What the error of an allocation of 16 TiB tells, and the batch that a retry comes down to."""
    asked_bytes = 1 << 44
    try:
        torch.empty(asked_bytes, dtype=torch.uint8, device=device)
    except Exception as error:
        text, info = str(error), oom_info(error)
    found: dict[str, Any] = {"text": text, "is_oom": info is not None, "asked_bytes": asked_bytes}
    if info is not None:
        found |= {"kind": info.kind, "device": info.device, "bytes": info.requested_bytes}

    @batch(initial_batchsize=1 << 18, cache_type=NoBatchsizeCache)
    def take(size: int) -> int:
        return len(torch.empty(size, 64 * MIB, dtype=torch.uint8, device=device))

    return found | {"retried": take()}


def full_device(device: torch.device) -> dict[str, Any]:
    """What a library's handle says that finds no memory left, and whether that is recognised."""
    held, n_bytes = [], 1 << 34
    x = torch.ones(64, 64, device=device)
    while n_bytes >= MIB:
        try:
            held.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            n_bytes //= 2
    try:
        torch.linalg.solve(x @ x, x)
    except Exception as error:
        info = oom_info(error)
        return {"text": str(error), "kind": info and info.kind, "held": len(held)}
    return {"text": "", "kind": None, "held": len(held)}


def pin_for_the_second(device: torch.device) -> list[int]:
    """The devices with a context, after paging on the second while the first is current."""
    from tenure.paging import page

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).eval()
    second = torch.device(device.type, 1)
    with torch.inference_mode(), page(model, second, budget="40KiB"):
        model(torch.ones(1, 64, device=second)).cpu()
    if device.type == "sim":
        return sorted(_sim.contexts)
    return [index for index in range(2) if torch._C._cuda_hasPrimaryContext(index)]


def replay_allocations(device: torch.device) -> dict[str, Any]:
    """Drive the device's allocator and the model of it alike; the first figure that differs."""
    from tenure.testing._allocator._caching import CachingPool

    module = torch.get_device_module(device)
    module.empty_cache()
    model = CachingPool(None, wait_host=lambda _: None, finished_s=lambda: 0.0)
    streams = [module.current_stream(device), module.Stream(device)]
    draw, held = random.Random(0), []
    for number in range(600):
        kind = draw.random()
        if held and (len(held) > 40 or kind < 0.4):
            _, block = held.pop(draw.randrange(len(held)))
            del _
            model.free(block)
            block = None
        elif kind < 0.98:
            n_bytes, which = int(2 ** draw.uniform(0, 26)), draw.randrange(2)
            with module.stream(streams[which]):
                tensor = torch.empty(n_bytes, dtype=torch.uint8, device=device)
            held.append((tensor, model.allocate(n_bytes, 0.0, which)))
            del tensor
        else:
            module.synchronize(device)
            module.empty_cache()
            model.empty_cache(0.0)
        real, modelled = module.memory_stats(device), model.statistics(0.0)
        for name in (f"{each}.all.current" for each in COUNTERS):
            if real[name] != modelled[name]:
                return {"at": number, "name": name, "real": real[name], "model": modelled[name]}
    return {"at": None, "reserved_bytes": module.memory_reserved(device), "n": 600}


_sim: Any = None


def main(name: str, device_type: str) -> None:
    """Run one of the above."""
    global _sim
    with ExitStack() as stack:
        if device_type == "sim":
            from tenure.testing import simulated_accelerator

            options: Any = {"allocator": "cuda", "devices": 2, "budget": "1GiB"}
            if name == "replay_allocations":
                del options["budget"]
            _sim = stack.enter_context(simulated_accelerator(**options))
        found = globals()[name](torch.device(device_type, 0))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
