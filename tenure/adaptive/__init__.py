"""Fitting work into the memory there is."""

from tenure._errors import AdaptiveUsageError as AdaptiveUsageError
from tenure._errors import AdaptiveUsageWarning as AdaptiveUsageWarning
from tenure._errors import BatchCoupledError as BatchCoupledError
from tenure._errors import OutOfRetriesError as OutOfRetriesError

from . import execute as execute
from . import explicit as explicit
from . import simple as simple
from ._batch_function import BatchFunction as BatchFunction
from ._batch_function import batch as batch
from ._budget import memory_budget as memory_budget
from ._caches import BatchsizeCache as BatchsizeCache
from ._caches import GlobalBatchsizeCache as GlobalBatchsizeCache
from ._caches import NoBatchsizeCache as NoBatchsizeCache
from ._caches import StacktraceMemoryBatchsizeCache as StacktraceMemoryBatchsizeCache
from ._check_split import check_split as check_split
from ._chunked_function import ChunkedFunction as ChunkedFunction
from ._chunked_function import chunked as chunked
from ._events import AdaptiveEvent as AdaptiveEvent
from ._events import AdaptiveStatistics as AdaptiveStatistics
from ._events import add_listener as add_listener
from ._events import remove_listener as remove_listener
from ._events import statistics as statistics
from ._host_memory import set_cpu_memory_limit as set_cpu_memory_limit
from ._oom import OomInfo as OomInfo
from ._oom import is_oom as is_oom
from ._oom import oom_info as oom_info
from ._oom_registry import OomRegistration as OomRegistration
from ._oom_registry import register_oom as register_oom
from ._oom_rules import OomKind as OomKind
from ._range_function import RangeFunction as RangeFunction
from ._range_function import range as range
from ._size_file import load as load
from ._size_file import reset as reset
from ._size_file import save as save
from ._split_report import SplitDifference as SplitDifference
from ._split_report import SplitReport as SplitReport
from ._step import StepResult as StepResult
from ._step import step as step

DEFAULT_CACHE_TYPE: type[BatchsizeCache] = StacktraceMemoryBatchsizeCache
"""What sizes are remembered for, where a call names no ``cache_type``; set it to change that."""
