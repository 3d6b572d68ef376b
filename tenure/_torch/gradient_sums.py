"""The sums that autograd's engine makes between two nodes, as a dispatch mode sees them.

If several gradients flow into one tensor, the engine adds them up, in place if nobody else holds
the first one. While a dispatch mode is open it never adds in place, so the program takes more than
without the mode. A mode that measures memory asks here which sums these are, and leaves them out.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from . import bound, require
from .autograd import ENGINE_CODE, check_engine_is_seen, node_number
from .storages import UseProbe, owners_of_storage, uses_of_tensor

_PREDICTION = "predictions of memory and memory_budget()"
_WRAPPERS = ("torch._dynamo", "torch._compile", "torch._ops", "tenure._stream._modes")
_TRANSFORMS = "torch._functorch.eager_transforms"
"""The module in which torch.func runs its backward passes."""
SUM = torch.ops.aten.add.Tensor
"""The operation by which the engine adds two gradients."""
current_node: Any = bound("torch._C._current_autograd_node", _PREDICTION)
"""The node that the engine runs on this thread, or has last run; None outside of the engine."""
next_sequence: Any = bound("torch._C._autograd._get_sequence_nr", _PREDICTION)
"""The number that the next node of this thread gets."""
_FILLED = frozenset(
    {
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.masked_scatter.default,
        torch.ops.aten.put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
    }
)
"""Operations by which formulas fill zeros of theirs."""
SUMS_AND_FILLS = _FILLED | {SUM}
"""Operations that torch may have done in place if no mode looked on."""
IN_PLACE = SUMS_AND_FILLS | {torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor}
"""The same, and those of `_ONLY_IN_PLACE`, which only predictions leave out."""
_ONLY_IN_PLACE = "BinaryCrossEntropyWithLogitsBackward0"
"""A node whose formula does `mul` and `sub` in place, unless a mode looks on."""
_FILL_ZEROS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Cummax", "Cummin", "Gather", "Index", "IndexSelect", "Kthvalue", "MaskedSelect", "Max",
        "Median", "Min", "Mode", "Nanmedian", "Sort", "Take", "Topk",
    )
    for number in range(2)
)  # fmt: skip
"""Nodes whose formula fills zeros in place, unless a mode looks on."""
_FORMULAS = (
    "Aminmax", "Atan2", "Cholesky", "CholeskyInverse", "CholeskySolve", "LinalgCholeskyEx",
    "LinalgDet", "LinalgLstsq", "LinalgLu", "LinalgLuFactorEx", "LinalgLuSolve", "LinalgPinv",
    "LinalgPolar", "LinalgQr", "LinalgSvd", "Logcumsumexp", "LuUnpack", "Mvlgamma",
    "NativeGroupNorm", "SpecialI1E", "SpecialLogNdtr", "SpecialModifiedBesselK1", "StdMean",
    "TriangularSolve", "VarMean",
)  # fmt: skip
_ADD_THEMSELVES = frozenset(f"{name}Backward0" for name in _FORMULAS)
"""Nodes whose own formula adds tensors, which looks like the engine's sums: found by running the
operators of torch's database alone, see ``tests/sweeps/test_gradient_sums.py``."""


def prepare() -> None:
    """Make sure of all that a mode asks here; to be called outside of handlers.

    Raises:
        MissingTorchNameError: a name is missing.
    """
    require(current_node, next_sequence)
    check_engine_is_seen()
    # inside of a handler it is another number
    _uses_alone()


def sequence_of_node() -> int:
    """Return the number that the running node got when the forward pass made it."""
    return node_number(current_node())


def adds_in_place(gradient: Tensor, frame: FrameType | None, n_modes_above: int = 0) -> bool:
    """Return whether the engine would add to ``gradient`` in place; ask in a handler of `SUM`.

    Args:
        gradient: the first operand of the sum.
        frame: the caller of the handler; None on a thread of the engine's own.
        n_modes_above: how many modes got the sum before this one.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp
    """
    node = current_node()
    if node is None or node.name() in _ADD_THEMSELVES or gradient.layout is not torch.strided:
        return False
    if not _is_called_by_engine(frame, n_modes_above):
        return False
    return _has_one_owner(gradient, n_modes_above) and _is_dense(gradient)


def writes_in_place(
    func: Any, operand: Tensor, frame: FrameType | None, n_modes_above: int = 0
) -> bool:
    """Return whether the engine, or a formula of torch, would write a result into an operand.

    Args:
        func: one of `IN_PLACE`, in whose handler this is asked.
        operand: its first one.
        frame: the caller of the handler; None on a thread of the engine's own.
        n_modes_above: how many modes got the operation before this one.
    """
    if func is SUM:
        return adds_in_place(operand, frame, n_modes_above)
    node = current_node()
    if node is None or not _is_called_by_engine(frame, n_modes_above):
        return False
    if func in _FILLED:
        return node.name() in _FILL_ZEROS
    return node.name() == _ONLY_IN_PLACE and _has_one_owner(operand, n_modes_above)


def _is_called_by_engine(frame: FrameType | None, n_modes_above: int) -> bool:
    """Return whether the engine runs the handler, on tensors that torch may write into."""
    while frame is not None:
        # functions between two handlers, or around one to keep the compiler out
        if not _name_of(frame).startswith(_WRAPPERS):
            if not n_modes_above or frame.f_code.co_name != "__torch_dispatch__":
                break
            n_modes_above -= 1
        frame = frame.f_back
    if frame is None or frame.f_code is not ENGINE_CODE:
        return frame is None
    while frame is not None and _name_of(frame).startswith("torch.autograd"):
        frame = frame.f_back
    # torch.func wraps its tensors, and torch writes into none of these
    return frame is None or _name_of(frame) != _TRANSFORMS


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _has_one_owner(gradient: Tensor, n_modes_above: int) -> bool:
    return (
        uses_of_tensor(gradient) <= _uses_alone() + n_modes_above
        and owners_of_storage(gradient.untyped_storage()) <= 1
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their part of the storage, none twice, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.cache
def _uses_alone() -> int:
    """Return how often a gradient is used, in a handler, that only the engine holds."""
    probe = UseProbe(SUM, lambda args: uses_of_tensor(args[0]))
    # Without bytes, so that no mode that measures counts the probe. On meta torch would import
    # dynamo, which takes longer than most programs.
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(0, requires_grad=True, device="cpu") * 2
        y = x.sin() + x.cos()
        with probe:
            y.backward(torch.ones(0, device="cpu"))
    return probe.n_uses
