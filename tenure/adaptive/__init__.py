"""Fitting work into the memory there is."""

from tenure._errors import AdaptiveUsageError as AdaptiveUsageError
from tenure._errors import BatchCoupledError as BatchCoupledError
from tenure._errors import OutOfRetriesError as OutOfRetriesError

from ._budget import memory_budget as memory_budget
from ._check_split import check_split as check_split
from ._events import AdaptiveEvent as AdaptiveEvent
from ._events import AdaptiveStatistics as AdaptiveStatistics
from ._events import add_listener as add_listener
from ._events import remove_listener as remove_listener
from ._events import statistics as statistics
from ._oom import OomInfo as OomInfo
from ._oom import is_oom as is_oom
from ._oom import oom_info as oom_info
from ._oom_registry import OomRegistration as OomRegistration
from ._oom_registry import register_oom as register_oom
from ._oom_rules import OomKind as OomKind
from ._split_report import SplitDifference as SplitDifference
from ._split_report import SplitReport as SplitReport
from ._step import StepResult as StepResult
from ._step import step as step
