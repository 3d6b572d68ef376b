"""`MemReporter`: which tensors are alive, what they are called, and what they take.

The reporter refers to models and optimizers weakly and keeps no tensor: between two calls it has
text and numbers only.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tenure._devices import indexed
from tenure._errors import ProfilerUsageError
from tenure._heap import is_kind
from tenure._text import format_bytes
from tenure._torch.quiet import without_functions

from .._owners import StorageEntry, take_census
from ._mem_report import UNEXPLAINED, MemReport, build_report


class MemReporter:
    """Reports every tensor of the process by name, and sums that add up to the total.

    Parameters, buffers, gradients and optimizer state are called by their names in the model;
    other tensors after the variable, attribute or container that holds them; and what only
    autograd holds after the node that saved it. Models and optimizers that are not given are found,
    and their names then begin with the name of their class. Tensors on ``meta`` are not listed.

    Args:
        model: the module whose dotted names are used.

    Raises:
        ProfilerUsageError: the model is no ``nn.Module``.

    Example:
        >>> import torch
        >>> from tenure.profiler import MemReporter
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> reporter = MemReporter(model)
        >>> reporter.collect_tensor()
        >>> report = reporter.get_stats()  # report() does both, and prints the tables
        >>> [(row.name, row.shape, row.n_bytes) for row in report.rows if row.name == "weight"]
        [('weight', (2, 4), 32)]
        >>> report.total_bytes == sum(report.categories.values()) + report.unexplained_bytes
        True

    Source: ``MemReporter`` of pytorch_memlab, https://github.com/Stonesjtu/pytorch_memlab.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not is_kind(type(model), nn.Module):
            raise ProfilerUsageError(
                f"MemReporter() wants the nn.Module whose names to use, and got "
                f"{type(model).__name__}. Pass the model, or nothing."
            )
        # weakly, so that a reporter in a global keeps no model alive
        self._model = None if model is None else weakref.ref(model)
        self._entries: list[StorageEntry] = []

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Accept an optimizer, whose state is named without this: all optimizers are found.

        Raises:
            ProfilerUsageError: it is no ``torch.optim.Optimizer``.
        """
        if not is_kind(type(optimizer), Optimizer):
            raise ProfilerUsageError(
                f"add_optimizer() wants a torch.optim.Optimizer, and got "
                f"{type(optimizer).__name__}. Pass the optimizer itself."
            )

    def collect_tensor(self) -> None:
        """Look at every tensor that is alive; none is kept."""
        model = None if self._model is None else self._model()
        self._entries = take_census([] if model is None else [model])

    def get_stats(
        self, verbose: bool = False, device: torch.device | str | int | None = None
    ) -> MemReport:
        """Sum up what `collect_tensor` saw.

        Args:
            verbose: name the owner of the storage where several tensors share one.
            device: the only device to report: a device, its name, or the index of an accelerator.

        Raises:
            ProfilerUsageError: the device can't be read as one.
        """
        only = _device_of(device)
        return build_report(self._entries, device=only, verbose=verbose)

    def print_stats(
        self,
        verbose: bool = False,
        target_device: torch.device | str | int | None = None,
        *,
        top: int | None = None,
        sort: str | None = None,
    ) -> None:
        """Print what `collect_tensor` saw; the arguments are those of `report`."""
        print(self.get_stats(verbose, target_device).text(top=top, sort=sort))

    def report(
        self,
        verbose: bool = False,
        device: torch.device | str | int | None = None,
        *,
        top: int | None = None,
        sort: str | None = None,
    ) -> MemReport:
        """Look, print the table, and return it.

        Args:
            verbose: name the owner of the storage where several tensors share one.
            device: the only device to report: a device, its name, or the index of an accelerator.
            top: how many tensors are printed, the largest first; the report has all.
            sort: the column that they are sorted by, as for ``MemReport.text``.

        Returns:
            The report: text, numbers, a rich table and HTML. On a device whose allocator counts
            its bytes (CUDA and other accelerators) the total is the allocator's; on the CPU, where
            torch keeps no such count, it is that of all storages found, so that nothing is
            unexplained there.

        Raises:
            ProfilerUsageError: the device can't be read as one.
        """
        self.collect_tensor()
        report = self.get_stats(verbose, device)
        print(report.text(top=top, sort=sort))
        return report

    def report_group(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        verbose: bool = False,
        device: torch.device | str | int | None = None,
    ) -> dict[int, MemReport]:
        """Report every rank of a process group; each of them must call it.

        Args:
            group: the group; None for all ranks.
            verbose: as for `report`.
            device: as for `report`.

        Returns:
            On every rank, the reports of all by their rank within the group. The first rank prints
            a line for each.

        Raises:
            ProfilerUsageError: no process group has been set up, or the device can't be read.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ProfilerUsageError(
                "A report over ranks needs a process group, and none has been set up. Call "
                "torch.distributed.init_process_group() first, or report() for this process alone."
            )
        self.collect_tensor()
        report = self.get_stats(verbose, device)
        gathered: list[MemReport] = [report] * dist.get_world_size(group)
        # The exchange makes tensors of its own, which no override of the program should see.
        with without_functions():
            dist.all_gather_object(gathered, report, group=group)
        if dist.get_rank(group) == 0:
            lines = [f"rank {rank}: {_summary_of(each)}" for rank, each in enumerate(gathered)]
            print("\n".join(lines))
        return dict(enumerate(gathered))


def _summary_of(report: MemReport) -> str:
    amounts = (*report.categories.items(), (UNEXPLAINED, report.unexplained_bytes))
    parts = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in amounts if n_bytes)
    return f"{format_bytes(report.total_bytes)}: {parts or 'nothing'}"


def _device_of(device: torch.device | str | int | None) -> torch.device | None:
    try:
        return None if device is None else indexed(device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ProfilerUsageError(
            f"{device!r} is no device that this torch knows. Pass a torch.device, a name such as "
            '"cuda:0" or "cpu", or the index of an accelerator.'
        ) from error
