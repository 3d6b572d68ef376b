"""Host memory from before the profiler was enabled: its end is seen, whatever else is alive."""

import torch

from tenure.profiler import LineProfiler

from ...programs import run_program

KEPT = []


class Unhashable(type):
    """A metaclass whose classes compare, and so have no hash."""

    def __eq__(cls, other):
        return cls is other


class Odd(metaclass=Unhashable):
    """Of such a class."""


def let_go():
    KEPT.clear()


def test_an_object_whose_class_has_no_hash_does_no_harm():
    odd = Odd()
    KEPT.append(torch.ones(100))
    with LineProfiler(let_go, device="cpu") as profiler:
        let_go()
    assert isinstance(odd, Odd)
    assert [r.freed_bytes for r in profiler.records] == [400]


def test_the_end_of_a_frozen_tensor_is_seen():
    code = """
import gc, torch
from tenure.profiler import LineProfiler
KEPT = [torch.ones(100)]
def let_go():
    KEPT.clear()
gc.freeze()
with LineProfiler(let_go, device="cpu") as profiler:
    let_go()
print([r.freed_bytes for r in profiler.records])
"""
    done = run_program(code)
    assert (done.stdout, done.stderr) == ("[400]\n", "")
