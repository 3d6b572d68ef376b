"""Other libraries that run a model from host memory, on the simulated device's virtual clock.

Each runs as its documentation says, over the same blocks. A library that is not installed, or that
the device or the clock does not serve, keeps its row, which says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._paging_blocks import Part, Workload, pass_s
from benchmarks._record import Row
from tenure.testing import RaceError, Rates, Simulator

_SMALLER = 1000
_HEAD_BYTES = 6
_MAX_REASON = 160


class _Blocks(nn.Module):
    """Blocks in a list, as libraries expect them, and a layer outside of it."""

    def __init__(self, sim: Simulator, workload: Workload, ratio: float) -> None:
        super().__init__()
        byte_s = ratio / sim.rates.h2d_bytes_per_s
        sizes = [n_bytes // _SMALLER for n_bytes in workload.block_bytes]
        self.blocks = nn.ModuleList(Part.block(sim, n, n * byte_s) for n in sizes)
        self.head = Part(sim, _HEAD_BYTES, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


Attach = Callable[[nn.Module, torch.device], object]


@dataclass(frozen=True, slots=True)
class _Peer:
    """A way of a library.

    Attributes:
        package: what it is installed as.
        what: the call.
        attach: prepares a model.
        reason: why it is not run, if it can't be.
    """

    package: str
    what: str
    attach: Attach
    reason: str = ""


def peer_rows(sim: Simulator, workloads: list[Workload]) -> Iterator[Row]:
    """A row for each way of each library and each workload; nothing stays on the device."""
    for peer in _peers():
        for workload in workloads:
            yield _row(sim, peer, workload)


def _row(sim: Simulator, peer: _Peer, workload: Workload) -> Row:
    try:
        name = f"{peer.package} {metadata.version(peer.package)}"
    except metadata.PackageNotFoundError:
        return Row(_title(workload, peer.package, peer), "not run", note="not installed")
    what = _title(workload, name, peer)
    if peer.reason:
        return Row(what, "not run", note=peer.reason)
    try:
        found = [_share(sim, peer, workload, ratio) for ratio in workload.ratios]
    except Exception as error:  # a peer may fail in any way, and its row says in which
        return Row(what, "not run", note=_in_short(error))
    shares = ", ".join(
        f"{ratio}: {share:.3f}" for ratio, (share, _) in zip(workload.ratios, found, strict=True)
    )
    peak = max(peak_bytes for _, peak_bytes in found) * _SMALLER / 1e6
    note = f"computation / copy {shares}; peak {peak:.0f} MB{_race(sim, peer, workload)}"
    return Row(what, f"{min(share for share, _ in found):.3f}", note=note)


def _title(workload: Workload, name: str, peer: _Peer) -> str:
    return f"share of the limit: {workload.what}; {name}, {peer.what}"


def _share(
    sim: Simulator, peer: _Peer, workload: Workload, ratio: float, *, detect_races: bool = False
) -> tuple[float, int]:
    """The share of the limit, and the peak of the device.

    Bytes and speeds are a thousandth of what the row says, so that every time is the same.
    """
    plain = Rates()
    rates = Rates(
        h2d_bytes_per_s=plain.h2d_bytes_per_s / _SMALLER,
        d2h_bytes_per_s=plain.d2h_bytes_per_s / _SMALLER,
        pageable_bytes_per_s=plain.pageable_bytes_per_s / _SMALLER,
        memory_bytes_per_s=plain.memory_bytes_per_s / _SMALLER,
    )
    sim(rates=rates, detect_races=detect_races)
    model = _Blocks(sim, workload, ratio).eval()
    parts = [module for module in model.modules() if isinstance(module, Part)]
    copied_s = sum(part.weight.nbytes for part in parts) / rates.h2d_bytes_per_s
    limit_s = max(copied_s, sum(part.compute_s for part in parts))
    peer.attach(model, sim.device)
    with torch.no_grad():
        elapsed_s = pass_s(sim, model)
    return limit_s / elapsed_s, sim.peak_bytes


def _race(sim: Simulator, peer: _Peer, workload: Workload) -> str:
    try:
        _share(sim, peer, workload, workload.ratios[0], detect_races=True)
    except RaceError as error:
        sim.take_faults()
        return f"; a race: {_in_short(error)}"
    return ""


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".replace("|", "/")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def _peers() -> list[_Peer]:
    return [
        _Peer("accelerate", "cpu_offload", _accelerate),
        _Peer("accelerate", "dispatch_model, all blocks on the CPU", _accelerate_dispatch),
        _Peer("diffusers", "block_level", _diffusers()),
        _Peer("diffusers", "block_level, use_stream", _diffusers(use_stream=True)),
        _Peer(
            "diffusers",
            "block_level, use_stream, record_stream",
            _diffusers(use_stream=True, record_stream=True),
        ),
        _Peer("diffusers", "leaf_level, use_stream", _diffusers("leaf_level", use_stream=True)),
        _Peer("pytorch-optimem", "page, leaves", _optimem(blocks=False)),
        _Peer("pytorch-optimem", "page, a layer a block", _optimem(blocks=True)),
        _Peer(
            "pytorch-optimem",
            "chunk",
            _optimem(blocks=True),
            "computes on the host, whose arithmetic takes no time on the virtual clock",
        ),
    ]


def _accelerate(model: nn.Module, device: torch.device) -> object:
    return import_module("accelerate").cpu_offload(model, execution_device=device)


def _accelerate_dispatch(model: Any, device: torch.device) -> object:
    places = {f"blocks.{i}": "cpu" for i in range(len(model.blocks))}
    accelerate = import_module("accelerate")
    return accelerate.dispatch_model(model, {**places, "head": str(device)}, main_device=device)


def _diffusers(kind: str = "block_level", **options: bool) -> Attach:
    def attach(model: nn.Module, device: torch.device) -> object:
        hooks = import_module("diffusers.hooks")
        per_group = 1 if kind == "block_level" else None
        return hooks.apply_group_offloading(
            model, device, offload_type=kind, num_blocks_per_group=per_group, **options
        )

    return attach


def _optimem(*, blocks: bool) -> Attach:
    def attach(model: Any, device: torch.device) -> object:
        sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        return import_module("optimem").page(model, device, max(sizes) + 1 if blocks else -1)

    return attach
