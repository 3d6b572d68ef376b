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
            names = set(vars(module))
            n_allocations, met, wrong = 0, 0, []
            number = 1
            while True:
                before = statistics().live
                sim.fail_at(number)
                try:
                    with torch.device(sim.device), contextlib.redirect_stdout(io.StringIO()):
                        module.main()
                except torch.OutOfMemoryError:
                    pass
                except BaseException as error:
                    wrong.append(f"allocation {number}: {type(error).__name__}: {error}")
                is_met = not sim.failure_is_planted
                sim.fail_at(None)
                wrong += _left(sim, module, before, number)
                if set(vars(module)) != names:
                    wrong.append(f"allocation {number} left names in {name}")
                if not is_met:
                    break
                met += 1
                n_allocations = number
                number += stride if number > 20 else 1
            found[name] = {"last": n_allocations, "met": met, "wrong": wrong}
    return found


def _left(sim, module, before, number):
    """What a run left: a scope that is open, a mode, tensors that are alive."""
    if current_scope() is not None or torch._C._len_torch_function_stack():
        yield f"allocation {number} left a scope open"
    # a cache of the example, which is to outlive its requests
    for value in vars(module).values():
        if isinstance(value, dict) and any(isinstance(v, torch.Tensor) for v in value.values()):
            value.clear()
        if isinstance(value, list) and any(isinstance(v, torch.Tensor) for v in value):
            value.clear()
    gc.collect()
    if statistics().live > before:
        yield f"allocation {number} left {statistics().live - before} tensors in scopes"
    if held := sim.allocated_bytes:
        yield f"allocation {number} left {held} bytes on the device"


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
