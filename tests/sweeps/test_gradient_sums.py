"""Which nodes of autograd add tensors themselves, over torch's own database of operators.

By a private name, because the sums that are found show only in the peak of a budget.
"""

import sys
from collections import Counter

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from tenure._torch import gradient_sums

from .samples import samples_of, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore")
_MOST_SAMPLES = 6


class _Sums(TorchDispatchMode):
    """Notes the nodes in which a sum looks like one that the engine does in place."""

    def __init__(self):
        super().__init__()
        self.nodes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_sum = func is torch.ops.aten.add.Tensor and isinstance(args[1], torch.Tensor)
        strided = is_sum and args[0].layout is torch.strided
        if strided and gradient_sums.adds_in_place(args[0], sys._getframe(1)):
            self.nodes.add(gradient_sums.current_node().name())
        return func(*args, **(kwargs or {}))


def _gradients_meet(roots):
    """Whether the engine has two gradients to add up anywhere below."""
    edges, seen, waiting = Counter(), set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            below = [edge for edge in node.next_functions if edge[0] is not None]
            edges.update(below)
            waiting += [each for each, _ in below]
    return any(n > 1 for n in edges.values())


def test_no_formula_of_torch_is_taken_for_a_sum_of_the_engine():
    gradient_sums.prepare()
    n_run, sums = 0, _Sums()
    for op in (each for each in op_db if each.supports_autograd):
        for sample in samples_of(op, torch.float32, _MOST_SAMPLES, grad=True):
            try:
                made = op(sample.input, *sample.args, **sample.kwargs)
            except (RuntimeError, TypeError):
                continue
            outs = [each for each in tensors_in(made) if each.requires_grad]
            if not outs or _gradients_meet(o.grad_fn for o in outs if o.grad_fn is not None):
                continue
            n_run += 1
            with sums:
                try:
                    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
                # an operator whose gradient is not for these arguments
                except RuntimeError:
                    continue
    assert n_run > 2000
    assert sums.nodes == set()
