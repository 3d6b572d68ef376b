"""Layers of LSTM, which oneDNN computes: what a forward pass keeps, and what both take.

Everything that they have is a product of steps, samples and rows whose ends are padded, so it is
known without running anything: to run the backward kernel on a workspace that no forward kernel has
filled would end the process.

Source: ``set_workspace_sizes`` in
https://github.com/uxlfoundation/oneDNN/blob/main/src/cpu/rnn/rnn_utils.hpp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LINE_BYTES = 64
_PAGE_BYTES = 4096
# gradients and cells, whatever the dtype
_WIDE_BYTES = 4
# a row of 16 bits ends at this many
_HALF_LINE = 8
# what its threads and its multiplications have beside what grows: seen are 3 pages and a half
_FIXED_PAGES = 5

# oneDNN 3.7, in torch 2.10, keeps two more copies of the states and five copies of the gates
_IS_OLD = torch.__version__ < "2.11"
_N_GATES = 5 if _IS_OLD else 1


class _Layer(NamedTuple):
    """One direction of one layer.

    Attributes:
        steps: of the sequence.
        samples: in a batch.
        inputs: features of the input of each step.
        hidden: features of the state.
        itemsize: bytes of an element.
    """

    steps: int
    samples: int
    inputs: int
    hidden: int
    itemsize: int

    @property
    def state_bytes(self) -> int:
        return self.samples * self.hidden * self.itemsize

    @property
    def output_bytes(self) -> int:
        return self.steps * self.state_bytes

    @property
    def bias_bytes(self) -> int:
        return 4 * self.hidden * self.itemsize


def rnn_workspace_bytes(args: Sequence[Any]) -> int:
    """Bytes of the last output of ``mkldnn_rnn_layer``, by its arguments.

    It keeps what backward needs wherever gradients are recorded, and nothing elsewhere.
    """
    if not torch.is_grad_enabled():
        return 0
    layer = _layer(args)
    wide, size = max(layer.inputs, layer.hidden), layer.itemsize
    cells = layer.steps * layer.samples
    # the states at all steps and one before, above the layer and below
    states = 2 * (layer.steps + 1) * layer.samples
    parts = [
        cells * _row(4 * layer.hidden, size),
        cells * _row(layer.hidden, size),
        states * _row(wide, size),
        states * _row(wide, size),
        states * _row(wide, _WIDE_BYTES),
        states * layer.hidden * _WIDE_BYTES,
        states * layer.hidden * _WIDE_BYTES,
    ]
    if _IS_OLD:
        parts += [states * _row(wide, size)] * 2
    total = sum(map(_in_pages, parts))
    if size < _WIDE_BYTES:
        # seen with inputs wider than the states, up to this
        more = max(layer.inputs - layer.hidden, 0) + _HALF_LINE
        total += states // 2 * more * _WIDE_BYTES + 4 * _PAGE_BYTES
    return total


def forward_bytes(args: Sequence[Any]) -> int:
    """What ``mkldnn_rnn_layer`` takes for itself: its weights in order, and gates."""
    layer = _layer(args)
    weights = (layer.inputs + layer.hidden) * _row(4 * layer.hidden, layer.itemsize)
    more = 0
    if not torch.is_grad_enabled():
        # another kernel, with states that otherwise are part of what is kept
        states = (layer.steps + 1) * layer.samples * 2 * (layer.inputs + layer.hidden)
        ends = layer.samples * (10 * layer.hidden + layer.inputs)
        # its rows end later
        rows = (layer.steps * layer.samples + layer.inputs + layer.hidden) * 4 * _HALF_LINE
        wider = states if layer.inputs > layer.hidden else 0
        more = (wider + ends + rows) * _WIDE_BYTES + _thread_bytes()
    return layer.bias_bytes + weights + _gates_bytes(layer) + more


def backward_bytes(args: Sequence[Any]) -> int:
    """What ``mkldnn_rnn_layer_backward`` takes: weights in two orders, their gradients, gates."""
    layer = _layer(args)
    rows = _row(layer.inputs, layer.itemsize) + _row(layer.hidden, layer.itemsize)
    weights = 4 * layer.hidden * rows
    gradients = (layer.inputs + layer.hidden) * _row(4 * layer.hidden, _WIDE_BYTES)
    # what it has no gradient of counts as zeros, and what has gaps is copied
    given = 0
    for grad, n_bytes in zip(
        args[10:13], (layer.output_bytes, layer.state_bytes, layer.state_bytes), strict=True
    ):
        given += 0 if isinstance(grad, Tensor) and grad.is_contiguous() else n_bytes
    return layer.bias_bytes + weights + gradients + given + _gates_bytes(layer)


def _layer(args: Sequence[Any]) -> _Layer:
    x, weight = args[0], args[2]
    return _Layer(x.shape[0], x.shape[1], x.shape[2], weight.shape[1], x.element_size())


def _gates_bytes(layer: _Layer) -> int:
    cells = layer.steps * layer.samples
    states = 2 * _N_GATES * layer.samples * _row(layer.hidden, _WIDE_BYTES)
    gates = _N_GATES * _in_pages(cells * _row(4 * layer.hidden, _WIDE_BYTES))
    fixed = _FIXED_PAGES * _PAGE_BYTES
    if layer.itemsize < _WIDE_BYTES:
        # tiles of each thread, and both kinds of gradients
        fixed += _thread_bytes() + 2 * layer.bias_bytes * _WIDE_BYTES
        fixed += (layer.inputs + layer.hidden) * 4 * _HALF_LINE * _WIDE_BYTES
    return gates + _in_pages(states) + fixed


def _thread_bytes() -> int:
    return 4 * _PAGE_BYTES * torch.get_num_threads()


def _row(n: int, itemsize: int) -> int:
    """Bytes of a row: whole cache lines, and no multiple of what caches are addressed by."""
    grain = _LINE_BYTES // itemsize
    length = -(-n // grain) * grain
    return (length + grain if length % 256 == 0 else length) * itemsize


def _in_pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE_BYTES) * _PAGE_BYTES
