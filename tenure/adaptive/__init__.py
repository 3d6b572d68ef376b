"""Fitting work into the memory there is: so far, telling its errors, and limiting a block."""

from tenure._errors import AdaptiveUsageError as AdaptiveUsageError

from ._budget import memory_budget as memory_budget
from ._oom import OomInfo as OomInfo
from ._oom import is_oom as is_oom
from ._oom import oom_info as oom_info
from ._oom_registry import OomRegistration as OomRegistration
from ._oom_registry import register_oom as register_oom
from ._oom_rules import OomKind as OomKind
