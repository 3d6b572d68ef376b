"""The examples on the simulated accelerator, with each allocation failing once.

In a process of its own: the accelerator takes a backend of torch for itself. As a program it prints
what it found as JSON; its argument is how many allocations to go on by.
"""

import contextlib
import gc
import importlib
import io
import json
import sys
from pathlib import Path

import torch

from tenure import current_scope, statistics
from tenure.testing import simulated_accelerator

# those that neither read files nor bring libraries of others, nor page: all their tensors move
EXAMPLES = ("training_loop", "inference_service", "find_a_leak")
_FOLDER = Path(__file__).parents[2] / "examples"


def _main_of(name):
    sys.path.insert(0, str(_FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(_FOLDER))


def run(stride):
    """For each example: allocations, failures that were met, and what was wrong after one."""
    found = {}
    with simulated_accelerator() as sim:
        for name in EXAMPLES:
            module = _main_of(name)
            last, met, wrong = 0, 0, []
            for number in (*range(1, 21), *range(21, 10**6, stride)):
                wrong += (f"allocation {number} {what}" for what in _run(sim, module, number))
                if sim.failure_is_planted:
                    break
                last, met = number, met + 1
            found[name] = {"last": last, "met": met, "wrong": wrong}
            sim.fail_at(None)
    return found


def _run(sim, module, number):
    """What a run with this failure raised, and left: a scope, a mode, tensors that are alive."""
    before, names = statistics().live, set(vars(module))
    sim.fail_at(number)
    try:
        with torch.device(sim.device), contextlib.redirect_stdout(io.StringIO()):
            module.main()
    except torch.OutOfMemoryError:
        pass
    except BaseException as error:
        yield f"raised {type(error).__name__}: {error}"
    if set(vars(module)) != names:
        yield "left names in the module"
    if current_scope() is not None or torch._C._len_torch_function_stack():
        yield "left a scope open"
    # a cache of the example, which is to outlive its requests
    for cache in [each for each in vars(module).values() if isinstance(each, dict | list)]:
        values = cache.values() if isinstance(cache, dict) else cache
        if any(isinstance(value, torch.Tensor) for value in values):
            cache.clear()
    gc.collect()
    if statistics().live > before:
        yield f"left {statistics().live - before} tensors in scopes"
    if held := sim.allocated_bytes:
        yield f"left {held} bytes on the device"


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
