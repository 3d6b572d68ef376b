"""The errors and warnings of every room, so that one ``except TenureError`` catches them all.

Nothing here imports torch: an error can be raised, caught and pickled without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# For type checkers alone: what an error carries has the type that its room gives it, so that users
# get its attributes completed and checked (see tests/typing/api.py).
if TYPE_CHECKING:
    from tenure.adaptive import OomInfo
    from tenure.profiler import Courtesy
    from tenure.scopes import LeakReport


class _Public:
    """A class that users import from a room, which tracebacks and pickle read as its module."""

    def __init_subclass__(cls, room: str = "") -> None:
        # without a room it is no public name, and pickle finds it only here
        cls.__module__ = room or cls.__module__


class TenureError(RuntimeError, _Public, room="tenure"):
    """Base class of the errors that tenure raises on purpose."""


class DisposedTensorError(TenureError, room="tenure"):
    """A tensor was used after it had been disposed."""


class DisposedAttributeError(DisposedTensorError, AttributeError):
    """An attribute of a disposed tensor was read; ``hasattr`` still answers False."""


class ScopeUsageError(TenureError, room="tenure"):
    """A scope was asked for something that it can't do, and nothing was changed."""


class ScopeLeakError(TenureError, room="tenure"):
    """Tensors outlived a scope whose policy is ``"raise"``.

    Attributes:
        report: the tensors and who holds each.
    """

    def __init__(self, message: str, report: LeakReport | None = None) -> None:
        # the message alone, here and below: an exception is pickled as its arguments and attributes
        super().__init__(message)
        self.report = report


class AdaptiveUsageError(TenureError, room="tenure.adaptive"):
    """A function of ``tenure.adaptive`` got what it can't use, and nothing was changed."""


class CourtesyError(TenureError, room="tenure.profiler"):
    """Memory could not be moved to the host, or not be brought back; no bytes were lost.

    Attributes:
        courtesy: whose ``restore()`` brings back what is still away.
    """

    def __init__(self, message: str, courtesy: Courtesy | None = None) -> None:
        super().__init__(message)
        self.courtesy = courtesy

    def __reduce__(self) -> tuple[type[CourtesyError], tuple[str]]:
        # what is away is away in this process only: it means nothing to another
        return type(self), (self.args[0],)


class AwayTensorError(CourtesyError, room="tenure.profiler"):
    """A tensor was used while its bytes were in host memory."""


class ProfilerUsageError(TenureError, room="tenure.profiler"):
    """A function of ``tenure.profiler`` got what it can't use, and nothing was changed."""


class PagingError(TenureError, room="tenure.paging"):
    """A model can't be paged as asked; what was asked for is not done, and the model is as before.

    Attributes:
        minimum_bytes: the least budget that would do, where the budget was the trouble.
    """

    def __init__(self, message: str, minimum_bytes: int | None = None) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class SimulatorUsageError(TenureError, room="tenure.testing"):
    """The simulated accelerator can't be set up here, or is not running; nothing was changed."""


class RaceError(TenureError, room="tenure.testing"):
    """Two streams of the simulated accelerator touched the same bytes, and nothing orders them."""


class OutOfRetriesError(TenureError, room="tenure.adaptive"):
    """Work ran out of memory at every size that was allowed; its cause is the last of the errors.

    Attributes:
        sizes: the sizes that were tried, in order.
        info: what the last out-of-memory error tells.
        least: the size that takes least, and the bytes that it needs, where all was predicted and
            nothing run, as by ``plan``; else None.
    """

    def __init__(
        self,
        message: str,
        sizes: tuple[int, ...] = (),
        info: OomInfo | None = None,
        least: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.sizes = sizes
        self.info = info
        self.least = least


class BatchCoupledError(TenureError, room="tenure.adaptive"):
    """A batch had to be split, and something in the work mixes its samples.

    Attributes:
        names: what mixes them, such as the names of modules.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class SplitMismatchError(TenureError, room="tenure.adaptive"):
    """A batch had to be split, and its micro-batches don't give what the whole gives.

    Nothing was delivered: gradients, buffers and random state are as before.

    Attributes:
        whole: a number of the batch in one piece: its loss, or an element of a gradient.
        split: the same number of its micro-batches.
        advice: what to declare.
    """

    def __init__(
        self,
        message: str,
        whole: float = float("nan"),
        split: float = float("nan"),
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.whole = whole
        self.split = split
        self.advice = advice


class RemoteRankError(TenureError, room="tenure.adaptive"):
    """Another rank has failed in work that all do together, or did not come to it.

    Nothing was delivered on any rank: gradients, buffers and random state are as before, unless
    the message says otherwise.

    Attributes:
        rank: the first of the ranks that failed, as counted in their group; None where it is not
            known which, as of one that died.
        cause: the kind and the text of its error; empty where that is not known.
    """

    def __init__(self, message: str, rank: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause


class PredictionError(TenureError, room="tenure.adaptive"):
    """Nothing can be said of the memory that work would take; nothing was run or changed."""


class MissingTorchNameError(TenureError, room="tenure"):
    """torch has dropped a private name that tenure needs; what does not need it works on.

    Attributes:
        name: the name, from ``torch`` on.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ByteSizeError(TenureError, ValueError, room="tenure"):
    """A number of bytes was written in a way that can't be read."""


class ReportFormatError(TenureError, ValueError, room="tenure"):
    """A report can't be read from what was given: another kind, a newer version, or altered."""


class CommandError(TenureError):
    """A verb of the command line can't do what was asked; the message is one line."""


class TenureWarning(UserWarning, _Public, room="tenure"):
    """Base class of the warnings that tenure gives."""


class ScopeUsageWarning(TenureWarning, room="tenure"):
    """A scope is used in a way that works, but seldom as it was meant."""


class AdaptiveUsageWarning(TenureWarning, room="tenure.adaptive"):
    """A function does what it may not do twice, and was run twice."""


class PagingWarning(TenureWarning, room="tenure.paging"):
    """A model is paged, but slower than it could be, or not for what it is used for."""


class CourtesyWarning(TenureWarning, room="tenure.profiler"):
    """Memory of a device was to be moved to the host, and some of it can't be."""


class ProfilerUsageWarning(TenureWarning, room="tenure.profiler"):
    """A profiler is used in a way that works, but not quite as it was asked for."""
