"""Fitting work into the memory there is."""

from tenure._errors import AdaptiveUsageError as AdaptiveUsageError
from tenure._errors import AdaptiveUsageWarning as AdaptiveUsageWarning
from tenure._errors import BatchCoupledError as BatchCoupledError
from tenure._errors import OutOfRetriesError as OutOfRetriesError
from tenure._errors import PredictionError as PredictionError
from tenure._errors import RemoteRankError as RemoteRankError
from tenure._errors import SplitMismatchError as SplitMismatchError
from tenure._oom import OomInfo as OomInfo
from tenure._oom import OomKind as OomKind
from tenure._oom import OomRegistration as OomRegistration
from tenure._oom import is_oom as is_oom
from tenure._oom import oom_info as oom_info
from tenure._oom import register_oom as register_oom

from . import execute as execute
from . import explicit as explicit
from . import simple as simple
from ._attempt import AdaptiveEvent as AdaptiveEvent
from ._attempt import AdaptiveStatistics as AdaptiveStatistics
from ._attempt import add_listener as add_listener
from ._attempt import remove_listener as remove_listener
from ._attempt import statistics as statistics
from ._decorators import batch as batch
from ._decorators import chunked as chunked
from ._decorators import range as range
from ._find_batch_size import find_batch_size as find_batch_size
from ._lazy import LazyTensor as LazyTensor
from ._lazy import lazy as lazy
from ._memory import memory_budget as memory_budget
from ._memory import set_cpu_memory_limit as set_cpu_memory_limit
from ._plan import Plan as Plan
from ._plan import plan as plan
from ._predict import Advice as Advice
from ._predict import PeakReport as PeakReport
from ._predict import fake_ranks as fake_ranks
from ._predict import predict_peak as predict_peak
from ._sizes import BatchsizeCache as BatchsizeCache
from ._sizes import GlobalBatchsizeCache as GlobalBatchsizeCache
from ._sizes import NoBatchsizeCache as NoBatchsizeCache
from ._sizes import StacktraceMemoryBatchsizeCache as StacktraceMemoryBatchsizeCache
from ._sizes import load as load
from ._sizes import reset as reset
from ._sizes import save as save
from ._step import SplitDifference as SplitDifference
from ._step import SplitReport as SplitReport
from ._step import StepResult as StepResult
from ._step import check_split as check_split
from ._step import step as step

DEFAULT_CACHE_TYPE: type[BatchsizeCache] = StacktraceMemoryBatchsizeCache
"""What sizes are remembered for, where a call names no ``cache_type``; set it to change that."""

# Not batch, range and chunked: a star would put them in the place of other names, range() first.
__all__ = [
    "DEFAULT_CACHE_TYPE",
    "AdaptiveEvent",
    "AdaptiveStatistics",
    "AdaptiveUsageError",
    "AdaptiveUsageWarning",
    "Advice",
    "BatchCoupledError",
    "BatchsizeCache",
    "GlobalBatchsizeCache",
    "LazyTensor",
    "NoBatchsizeCache",
    "OomInfo",
    "OomKind",
    "OomRegistration",
    "OutOfRetriesError",
    "PeakReport",
    "Plan",
    "PredictionError",
    "RemoteRankError",
    "SplitDifference",
    "SplitMismatchError",
    "SplitReport",
    "StacktraceMemoryBatchsizeCache",
    "StepResult",
    "add_listener",
    "check_split",
    "execute",
    "explicit",
    "fake_ranks",
    "find_batch_size",
    "is_oom",
    "lazy",
    "load",
    "memory_budget",
    "oom_info",
    "plan",
    "predict_peak",
    "register_oom",
    "remove_listener",
    "reset",
    "save",
    "set_cpu_memory_limit",
    "simple",
    "statistics",
    "step",
]
