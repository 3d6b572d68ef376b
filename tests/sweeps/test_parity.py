"""Parity: an operator on the device gives what it gives on the CPU, forward and backward.

The samples are torch's own, from the OpInfo database; random operators draw the same numbers,
because both generators are seeded alike before each run.
"""

import warnings

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.threads import on_thread

from .samples import gradients_of, samples_of

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
# Set on each generator by itself: torch.manual_seed also queues a call, with its traceback, for
# every kind of accelerator that is not there.
SEED = 2026

# Their result is memory that nothing has written: only its geometry can agree.
UNWRITTEN = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
# An argument that CUDA wants on the host too.
HOST_ARGUMENTS = {"tensor_split"}
# The device takes another path to the result than the CPU: math instead of flash attention.
OTHER_PATH = {"nn.functional.scaled_dot_product_attention"}

# Reviewed. Sparse layouts have dispatch keys of their own, which a Python device cannot serve.
DOES_NOT_RUN = {"sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"}

# Reviewed. These have no samples that the CPU runs, so there is nothing to compare with.
NOT_COMPARABLE = {
    "broadcast_shapes", "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args",
    "jiterator_binary", "jiterator_binary_return_by_ref", "jiterator_unary",
    "nn.functional.batch_norm.without_cudnn", "torch._scaled_mm", "torch._scaled_mm_v2",
    "torch.ops.aten._efficient_attention_forward", "torch.ops.aten._flash_attention_forward",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_samples", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_every_operator_gives_what_it_gives_on_the_cpu_or_is_listed_here(sim, n_samples):
    # OpInfo inspects the whole stack for its samples: a thread's is short, pytest's is not.
    agreeing, not_on_cpu, failing = on_thread(sweep, sim.device, n_samples)
    assert failing.keys() == DOES_NOT_RUN, failing
    assert not_on_cpu == NOT_COMPARABLE
    assert len(agreeing) > 680


def sweep(device, n_samples):
    """The operators that agree, those that the CPU does not run, and those that fail, and why."""
    from torch.testing._internal.common_methods_invocations import op_db

    agreeing, not_on_cpu, failing = set(), set(), {}
    for info in op_db:
        try:
            n_compared = sum(_agrees(info, each, device) for each in _samples(info, n_samples))
        except Exception as error:
            failing[info.full_name] = f"{type(error).__name__}: {str(error)[:120]}"
        else:
            (agreeing if n_compared else not_on_cpu).add(info.full_name)
    return agreeing, not_on_cpu, failing


def _samples(info, n_samples):
    supported = info.supported_dtypes("cpu")
    dtype = next((each for each in DTYPES if each in supported), None)
    if dtype is None:
        return []
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    return samples_of(info, dtype, n_samples, grad=differentiable)


def _agrees(info, sample, device):
    """Whether the CPU runs a sample; an error if the device does not give the same."""
    host_arguments = _arguments(info, sample, torch.device("cpu"))
    device_arguments = _arguments(info, sample, device)
    try:
        torch.default_generator.manual_seed(SEED)
        expected, host_warnings = _run(info, host_arguments)
    except Exception:
        return False
    torch.get_device_module(device).manual_seed(SEED)
    actual, device_warnings = _run(info, device_arguments)
    assert device_warnings <= host_warnings
    if info.name in UNWRITTEN:
        expected, actual = tree_map_only(torch.Tensor, torch.zeros_like, (expected, actual))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if info.name in OTHER_PATH else {}
    _compare(actual, expected, device, tolerance)
    try:
        theirs = gradients_of(expected, host_arguments)
    except RuntimeError:
        # not differentiable at this sample
        return True
    _compare(gradients_of(actual, device_arguments), theirs, device, tolerance)
    return True


def _arguments(info, sample, device):
    """The sample's `(input, args, kwargs)` with every tensor and device moved to `device`."""

    def copy(tensor):
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    tree = (sample.input, sample.args, dict(sample.kwargs))
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(tree)):
        tree[2]["device"] = device
    first, args, kwargs = tree_map_only(str, lambda text: device if text == "cpu" else text, tree)
    first = tree_map_only(torch.Tensor, copy, first)
    if info.name not in HOST_ARGUMENTS:
        args, kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return tree_map_only(torch.device, lambda _: device, (first, args, kwargs))


def _run(info, arguments):
    """The result, and the first sentence of each warning."""
    first, args, kwargs = arguments
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = info.op(first, *args, **kwargs)
    return result, {str(warning.message).partition(".")[0] for warning in caught}


def _compare(actual, expected, device, tolerance):
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.device == device
            assert_close(mine.cpu(), theirs, equal_nan=True, **tolerance)
