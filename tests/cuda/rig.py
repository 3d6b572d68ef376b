"""Checks, and the device that they run on: a GPU, or the simulated one with `--dry`."""

import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MIB = 1 << 20


class Skipped(Exception):
    """Raise it in a check that can't run here, with the reason."""


@dataclass(frozen=True)
class Check:
    """A function that gets a `Rig`, raises an AssertionError, or returns the figures it saw.

    Attributes:
        limit_s: the seconds after which its process is ended.
        alone: whether nothing else may use the machine meanwhile, because it measures time, or
            takes the whole device.
        gpu_only: why it can't run on the simulated device; empty if it can.
        environment: variables that must be set before torch is imported.
        sim: options of the simulated device.
    """

    name: str
    run: Callable[["Rig"], Mapping[str, Any]]
    limit_s: float = 60
    alone: bool = False
    gpu_only: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    sim: Mapping[str, Any] = field(default_factory=dict)


OOM_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."

CHECKS: dict[str, Check] = {}


def check(name: str = "", **options: Any) -> Callable[[Any], Any]:
    """Register a function as a check, under its own name or another."""

    def register(run: Any) -> Any:
        chosen = name or run.__name__
        assert chosen not in CHECKS, chosen
        CHECKS[chosen] = Check(chosen, run, **options)
        return run

    return register


@dataclass
class Rig:
    """A device under check.

    Attributes:
        device: `cuda:0` or `sim:0`.
        sim: the simulator; None on a GPU.
    """

    device: torch.device
    sim: Any = None

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.device)

    def pick(self, on_gpu: Any, simulated: Any) -> Any:
        """A size for each kind of device."""
        return on_gpu if self.sim is None else simulated

    def at(self, index: int) -> torch.device:
        return torch.device(self.device.type, index)

    def bytes(self, n_bytes: int) -> torch.Tensor:
        """uint8[n_bytes] on the device."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def allocated(self) -> int:
        return int(self.module.memory_allocated(self.device))

    def reserved(self) -> int:
        return int(self.module.memory_reserved(self.device))

    def peak(self) -> int:
        return int(self.module.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        self.module.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def tidy(self) -> None:
        """Free garbage and what is cached."""
        gc.collect()
        self.synchronize()
        self.module.empty_cache()

    def needs_two_devices(self) -> None:
        if self.module.device_count() < 2:
            raise Skipped("needs two devices")

    @contextlib.contextmanager
    def limited(self, n_bytes: int) -> Iterator[None]:
        """A block in which the allocator may reserve so much more than what is in use now."""
        self.tidy()
        if self.sim and self.sim.allocator == "exact":
            self.sim.budget_bytes = self.allocated() + n_bytes
            try:
                yield
            finally:
                self.sim.budget_bytes = None
            return
        total_bytes = self.module.get_device_properties(self.device).total_memory
        before = self.module.get_per_process_memory_fraction(self.device)
        allowed_bytes = self.reserved() + n_bytes
        self.module.set_per_process_memory_fraction(allowed_bytes / total_bytes, self.device)
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(before, self.device)

    def milliseconds(self, work: Callable[[], object], *, times: int = 3) -> float:
        """The least time that work takes on the device."""
        found = []
        for _ in range(times):
            begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return min(found)


def raised(kind: type[BaseException], call: Callable[[], object], text: str = "") -> Any:
    """The error that a call raises, which has to be of this kind and to say this."""
    found = None
    try:
        call()
    except kind as error:
        found = error
    assert found is not None, f"no {kind.__name__} was raised"
    assert text in str(found), f"the error lacks {text!r}: {found}"
    return found


def off_by(ours: Any, theirs: Any) -> float:
    """The largest difference of tensors, by the largest value of each."""
    differences = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        differences.append(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return max(differences)


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether tensors on any device are equal, one by one."""
    pairs = itertools.zip_longest(ours, theirs)
    return all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in pairs)


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def transformers() -> Any:
    """The library, without which a check is skipped."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise Skipped("transformers is missing") from None
