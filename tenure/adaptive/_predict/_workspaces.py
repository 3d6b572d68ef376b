"""Memory that kernels of an accelerator take for themselves, which no tensor shows: an allowance.

Without the device nobody can measure it. What is said here is what the sources and the formats of
these kernels allow: too much rather than too little.

Source: ``aten/src/ATen/native/cuda``, ``aten/src/ATen/cuda/CUDABlas.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._cuda_blocks import BLOCK_BYTES, MIB, SMALL_SEGMENT_BYTES, taken_by
from tenure._text import format_bytes
from tenure._torch.device_allocator import workspace_bytes

from . import _cudnn_rnn

# where CUDA is not in use and can't be asked: torch's default on Hopper, the largest there is
_CUBLAS_BYTES = 32 * MIB
# torch multiplies on the calling thread, and in a backward pass on the engine's, each with a handle
_PRODUCTS = re.compile(
    r"(add|badd)?b?mm|(add)?mv|v?dot|linear|matmul|_addmm_activation|_(int|scaled|grouped)_mm"
)
_PUT = frozenset({"index_put", "index_put_", "_index_put_impl_"})
_OF_RANKS = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"})
"""Collectives, and the copies of ``fully_shard`` around them, which take nothing else."""
_ATTENTION_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class _OperationKind(NamedTuple):
    """Operations that are alike.

    Attributes:
        roots: what their names begin with.
        of_given: how much they take, in bytes of what they are given.
        of_made: and of what they make.
        name: what they are, in words.
    """

    roots: tuple[str, ...]
    of_given: int
    of_made: int
    name: str


_SOLVERS = (
    *("cholesky", "eig", "householder", "inv", "ldl", "lstsq", "lu", "matrix_exp", "qr"),
    *("solve", "svd"),
)
_KINDS = (
    _OperationKind(
        ("convolution", "_convolution", "cudnn_convolution", "slow_conv", "_conv_depthwise"),
        1,
        1,
        "convolutions",
    ),
    # on top of what `taken_inside` returns
    _OperationKind(("_cudnn_rnn",), 0, 1, "recurrent layers"),
    _OperationKind(("mkldnn_rnn", "_thnn_fused", "lstm", "gru"), 2, 2, "recurrent layers"),
    # sums in float32
    _OperationKind(
        ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
        0,
        2,
        "attention",
    ),
    # keys and their places, each twice
    _OperationKind(
        ("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "_unique", "unique"),
        8,
        0,
        "sorting",
    ),
    _OperationKind(
        ("index_put", "_index_put", "embedding_dense_backward", "_embedding_bag"),
        3,
        0,
        "embeddings and writes by index",
    ),
    _OperationKind(
        ("_linalg", "_fft", "cholesky", "triangular_solve", *(f"linalg_{s}" for s in _SOLVERS)),
        3,
        3,
        "solvers and Fourier transforms",
    ),
)


class Workspaces:
    """Notes which kernels run that take memory for themselves.

    Args:
        device: whose memory it is.

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

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str) -> tuple[int, ...]:
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
        namespace, _, name = str(func).partition(".")
        name = name.partition(".")[0]
        if namespace in ("profiler", "prim"):
            return ()
        if namespace in _OF_RANKS:
            self.reasons.setdefault("what a library of collectives takes is not counted, as NCCL's")
        elif namespace != "aten":
            self.reasons.setdefault(f"nobody has measured what {func} takes for itself")
        elif _PRODUCTS.fullmatch(name):
            return self._note_product("backward" if phase == "backward" else "forward")
        else:
            self._note_kind(name, args, kwargs, result)
        return ()

    @property
    def allowance_bytes(self) -> int:
        """What may be taken on top of the tensors, at the most."""
        if self._device.type != "cuda":
            return self._saved_bytes + self._most_bytes
        # the other one for the partial sums of reductions
        own_bytes = SMALL_SEGMENT_BYTES + (0 if self._sizes else self._kept_bytes())
        return self._saved_bytes + self._most_bytes + own_bytes

    def notes(self) -> list[str]:
        """Return the notes on memory that no tensor shows."""
        n_bytes = self._kept_bytes()
        return [f"cuBLAS keeps workspaces of {format_bytes(n_bytes)} at most"] if n_bytes else []

    def _kept_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        sizes = self._sizes or [_CUBLAS_BYTES]
        return taken_by(sizes * len(self._multiplying), self._device).reserved_bytes

    def _note_product(self, thread: str) -> tuple[int, ...]:
        is_first = thread not in self._multiplying
        self._multiplying.add(thread)
        return tuple(self._sizes) if is_first else ()

    def _note_kind(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        kind = _kind_of(name)
        # what is put, and not added, is not sorted
        if kind is None or (name in _PUT and not any(args[3:])):
            return
        given, made = _bytes_of((args, kwargs)), _bytes_of(result)
        self._most_bytes = max(self._most_bytes, kind.of_given * given + kind.of_made * made)
        self.reasons.setdefault(f"the memory inside {kind.name} is estimated")
        if name == _ATTENTION_OF_CPU:
            self._saved_bytes += _saved_elsewhere(*args[:2])


def taken_inside(func: Any, args: Any) -> tuple[int, ...]:
    """Return the most bytes that an operation has beside its result, if they are known."""
    if func in _cudnn_rnn.KERNELS:
        return _cudnn_rnn.work_bytes(func, args)
    if str(func) != "aten._safe_softmax.default":
        return ()
    scores, dim = args[0], args[1]
    # which scores are minus infinity, which rows of them all are, and a zero
    n_rows = scores.numel() // max(1, scores.shape[dim])
    return int(scores.numel()), int(n_rows), int(scores.element_size())


def _bytes_of(values: Any) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in passed_tensors(values))


def _saved_elsewhere(query: Tensor, key: Tensor) -> int:
    """Return the bytes that attention saves on an accelerator but not on the CPU."""
    if query.dtype is not torch.float64:
        # the state of its random numbers
        return 2 * BLOCK_BYTES
    # no fused kernel has it: the scores, and their softmax
    return 2 * query.nbytes // query.shape[-1] * key.shape[-2]


@functools.cache
def _kind_of(name: str) -> _OperationKind | None:
    return next((kind for kind in _KINDS if name.startswith(kind.roots)), None)
