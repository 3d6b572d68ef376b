"""The device whose memory a prediction reports, and the memory that its kernels use themselves.

A device that this machine lacks can still be named: the work runs as on the CPU, and its tensors
are counted as that device would. No tensor shows the memory inside kernels, so it is an allowance:
the most that the sources and the formats of these kernels allow.

Source: ``aten/src/ATen/native/cuda``, ``aten/src/ATen/cuda/CUDABlas.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._cuda_blocks import BLOCK_BYTES, MIB, SMALL_SEGMENT_BYTES, taken_by
from tenure._devices import NO_ACCELERATOR, indexed, is_here
from tenure._errors import PredictionError
from tenure._text import format_bytes
from tenure._torch.device_allocator import workspace_bytes

_aten = torch.ops.aten


class Target(NamedTuple):
    """The device on which work would run.

    Attributes:
        device: the device whose memory is reported.
        runs_on: the device of the tensors without data.
        moves: whether the work's tensors, all on the host, are taken to be there.
    """

    device: torch.device
    runs_on: torch.device
    moves: bool = False

    @property
    def is_host(self) -> bool:
        """True if it is the host's memory, of which kernels use some themselves."""
        return self.device.type == "cpu"

    @property
    def stands_for(self) -> str | None:
        """The kind of device that is not here, for which the CPU stands; None if it does not."""
        return None if self.device.type == self.runs_on.type else self.device.type

    def place_of(self, tensor: Tensor) -> torch.device:
        """Return the device on which a tensor of the work appears."""
        if tensor.device.type == "meta" or (self.moves and tensor.device.type == "cpu"):
            return self.runs_on
        return tensor.device

    def made_on(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an operation, for a device that is here.

        Raises:
            PredictionError: the device that the work names is neither here nor the one asked for;
                the process would end where autograd meets a tensor of it.
        """
        device = kwargs.get("device")
        if device is None or device.type in NO_ACCELERATOR or is_here(device.type):
            return kwargs
        if device.type != self.device.type:
            raise PredictionError(
                f"The work makes a tensor on {device}, which this machine lacks. Pass "
                f'device="{device.type}" to predict what the work takes there.'
            )
        return {**kwargs, "device": self.runs_on}


def target_of(device: torch.device | str | None, tensors: Iterable[Tensor]) -> Target:
    """Find out where work runs.

    Args:
        device: the device that the caller named; None for that of the first tensor with data.
            The others are not counted: work on several devices is predicted for each in turn.
        tensors: the parameters and inputs of the work.

    Raises:
        PredictionError: the work's tensors are on accelerators of another kind.
    """
    found = [each.device for each in tensors if each.device.type != "meta"]
    if device is None:
        device = next(iter(found), torch.device("cpu"))
        return Target(device, device)
    named = torch.device(device)
    if named.type in NO_ACCELERATOR:
        return Target(torch.device("cpu"), torch.device("cpu"))
    accelerators = [each for each in found if each.type != "cpu"]
    if accelerators:
        alike = [each for each in accelerators if each.type == named.type]
        if not alike:
            raise PredictionError(
                f"The work's tensors are on {accelerators[0]}, and device= names {named}. Leave "
                "device= out, or predict with a model on the CPU or on meta."
            )
        named = alike[0] if named.index is None else named
        return Target(named, named)
    if not is_here(named.type):
        return Target(named, torch.device("cpu"))
    named = indexed(named)
    return Target(named, named, moves=True)


# --- the allowance for kernels

# where CUDA is not in use and can't be asked: torch's default on Hopper, the largest there is
_CUBLAS_BYTES = 32 * MIB
# torch multiplies on the calling thread, and in a backward pass on the engine's, each with a handle
_PRODUCTS = re.compile(
    r"(add|badd)?b?mm|(add)?mv|v?dot|linear|matmul|_addmm_activation|_(int|scaled|grouped)_mm"
)
_PUT = frozenset({"index_put", "index_put_", "_index_put_impl_"})
OF_GROUPS = "c10d"
"""The namespace of operations that are handed to a process group."""
EXCHANGES = frozenset({OF_GROUPS, "_c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of all operations between ranks."""
# the copies of ``fully_shard`` around them take nothing else
_OF_RANKS = EXCHANGES | {"fsdp"}
_SOLVERS = (
    *("cholesky", "eig", "householder", "inv", "ldl", "lstsq", "lu", "matrix_exp", "qr"),
    *("solve", "svd"),
)
# kind, bytes for each byte that they are given, and that they make, and how their names begin
_KINDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("convolutions", 1, 1, ("convolution", "_convolution", "cudnn_convolution", "slow_conv")),
    ("convolutions", 1, 1, ("_conv_depthwise",)),
    # on top of `taken_inside`
    ("recurrent layers", 0, 1, ("_cudnn_rnn",)),
    ("recurrent layers", 2, 2, ("mkldnn_rnn", "_thnn_fused", "lstm", "gru")),
    # sums in float32
    ("attention", 0, 2, ("_scaled_dot_product", "_flash_attention", "_efficient_attention")),
    # keys and their places, each twice
    ("sorting", 8, 0, ("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "_unique")),
    ("sorting", 8, 0, ("unique",)),
    ("embeddings and writes by index", 3, 0, ("index_put", "_index_put", "_embedding_bag")),
    ("embeddings and writes by index", 3, 0, ("embedding_dense_backward",)),
    ("solvers and Fourier transforms", 3, 3, ("_linalg", "_fft", "cholesky", "triangular_solve")),
    ("solvers and Fourier transforms", 3, 3, tuple(f"linalg_{each}" for each in _SOLVERS)),
)


class Workspaces:
    """Notes which kernels run that use memory themselves.

    Args:
        device: the device whose memory it is.

    Attributes:
        reasons: what is assumed of them; each once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # known if CUDA is in use; else they are part of the allowance
        self._sizes = [size for size in workspace_bytes(device).values() if size]
        self._most_bytes = self._saved_bytes = 0
        self._multiplying: set[str] = set()
        self.reasons: dict[str, None] = {}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str) -> list[int]:
        """Note an operation.

        Args:
            func: as a dispatch mode gets it.
            args: its arguments.
            kwargs: the others.
            result: what it made.
            phase: a backward pass has a thread, and with it libraries' handles, of its own.

        Returns:
            The bytes of the workspaces that it is the first to need, and that stay.
        """
        name = func.__name__.partition(".")[0]
        if func.namespace in _OF_RANKS:
            self.reasons.setdefault("what a library of collectives takes is not counted, as NCCL's")
        elif func.namespace not in ("aten", "profiler", "prim"):
            self.reasons.setdefault(f"nobody has measured what {func} takes for itself")
        elif _PRODUCTS.fullmatch(name):
            thread = "backward" if phase == "backward" else "forward"
            if thread not in self._multiplying:
                self._multiplying.add(thread)
                return self._sizes
        # what is put, and not added, is not sorted
        elif name not in _PUT or any(args[3:]):
            self._note_kind(name, args, kwargs, result)
        return []

    def _note_kind(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        for kind, of_given, of_made, begins in _KINDS:
            if name.startswith(begins):
                n_bytes = of_given * bytes_of((args, kwargs)) + of_made * bytes_of(result)
                self._most_bytes = max(self._most_bytes, n_bytes)
                self.reasons.setdefault(f"the memory inside {kind} is estimated")
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            query, key = args[:2]
            # An accelerator saves more than the CPU: the state of its random numbers; or the scores
            # and their softmax, where no fused kernel has the dtype.
            n_scores_bytes = query.nbytes // query.shape[-1] * key.shape[-2]
            is_fused = query.dtype is not torch.float64
            self._saved_bytes += 2 * (BLOCK_BYTES if is_fused else n_scores_bytes)

    @property
    def allowance_bytes(self) -> int:
        """The most that may be taken on top of the tensors."""
        n_bytes = self._saved_bytes + self._most_bytes
        if self._device.type == "cuda":
            # the segment for the partial sums of reductions
            n_bytes += SMALL_SEGMENT_BYTES + (0 if self._sizes else self._kept_bytes())
        return n_bytes

    def notes(self) -> list[str]:
        """Return the notes on memory that no tensor shows."""
        n_bytes = self._kept_bytes()
        return [f"cuBLAS keeps workspaces of {format_bytes(n_bytes)} at most"] if n_bytes else []

    def _kept_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        sizes = self._sizes or [_CUBLAS_BYTES]
        return taken_by(sizes * len(self._multiplying), self._device).reserved_bytes


def taken_inside(func: Any, args: Any) -> list[int]:
    """Return the most bytes that an operation has beside its result, if they are known."""
    if func in RECURRENT:
        is_backward = func is _aten._cudnn_rnn_backward.default
        settings = args[10:] if is_backward else args[6:]
        _, work_bytes = _layers_bytes(args[0], args[1], settings)
        # cuDNN wants the batch second
        transposed = [args[0], args[7]] if is_backward else [args[0]]
        return [work_bytes, *(bytes_of(each) for each in transposed if settings[4])]
    if func is not _aten._safe_softmax.default:
        return []
    scores, dim = args[0], args[1]
    # which scores are minus infinity, which rows of them all are, and a zero
    n_rows = scores.numel() // max(1, scores.shape[dim])
    return [scores.numel(), n_rows, scores.element_size()]


def bytes_of(values: Any) -> int:
    """Return the bytes of the elements of all tensors in containers, also of fakes."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in passed_tensors(values))


# --- recurrent layers, of which torch's kernels for fake tensors know no memory

# by the modes of cuDNN: RNN with relu and with tanh, LSTM, GRU
_KEPT = (1, 1, 5, 6)
"""The number of values that the reserve keeps for each value of the states."""
_AT_WORK = (4.2, 4.2, 5.6, 4.6)
"""The number of values that the working memory has for each value of the states."""
_LAYER_BYTES = 8 * MIB
"""The least working memory of each layer and direction."""


def _layers_bytes(x: Tensor, weight: list[Tensor], settings: Any) -> tuple[int, int]:
    """Return the bytes of the reserve for the backward pass, and of the working memory.

    The reserve is exactly as large as cuDNN 9 made it on an H100 for LSTM and GRU in float32; the
    working memory of large layers is within a few percent. Another GPU may choose other kernels.
    """
    mode, n_hidden, n_projected, n_layers, _, dropout, train, bidirectional = settings[:8]
    n_directions = 1 + bidirectional
    n_states = n_directions * (x.numel() // x.shape[-1]) * n_hidden
    states_bytes = n_states * x.element_size()
    between = n_layers - 1
    n_kept = n_layers * (_KEPT[mode] + 2 * bool(n_projected)) + (0 if n_projected else between)
    # a bit for each value that is dropped or not
    mask_bytes = between * n_states // 8 if dropout else 0
    reserve_bytes = n_kept * states_bytes + mask_bytes + BLOCK_BYTES if train else 0
    least_bytes = _LAYER_BYTES * n_layers * n_directions
    return reserve_bytes, int(_AT_WORK[mode] * states_bytes) + bytes_of(weight) + least_bytes


def _cudnn_rnn(*args: Any) -> tuple[Tensor, ...]:
    output, hy, cy, reserve, weight_buf = _aten._cudnn_rnn.default(*args)
    reserve_bytes, _ = _layers_bytes(args[0], args[1], args[6:])
    return output, hy, cy, reserve.new_empty(reserve_bytes), weight_buf


def _cudnn_rnn_backward(*args: Any) -> tuple[Any, ...]:
    x, weight, hx, cx, mask = args[0], args[1], args[4], args[5], args[21]
    made = [
        torch.empty_like(each) if each is not None and is_wanted else None
        for each, is_wanted in zip((x, hx, cx), mask, strict=False)
    ]
    # the gradients of weights lie in one block
    sizes = [each.numel() for each in weight]
    parts = weight[0].new_empty(sum(sizes)).split(sizes) if mask[3] else ()
    return *made, [part.view(each.shape) for part, each in zip(parts, weight, strict=False)]


RECURRENT = {
    _aten._cudnn_rnn.default: _cudnn_rnn,
    _aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}
"""Functions that return the results of recurrent layers on CUDA, without data."""
