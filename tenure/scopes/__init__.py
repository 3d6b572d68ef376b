"""Lifetimes: who owns a tensor, when it is let go, and what leaked."""

from ._disposal import is_disposed as is_disposed
from ._functions import attach_to_scope as attach_to_scope
from ._functions import detach_from_scope as detach_from_scope
from ._functions import dispose as dispose
from ._functions import move_to as move_to
from ._functions import move_to_outer as move_to_outer
from ._functions import owner_of as owner_of
from ._leaks import LeakRecord as LeakRecord
from ._leaks import LeakReport as LeakReport
from ._scope import DisposeScope as DisposeScope
from ._scope import NewDisposeScope as NewDisposeScope
from ._scope import current_scope as current_scope
from ._scoped import persist as persist
from ._scoped import scoped as scoped
from ._self_test import check as _check
from ._thread import ScopeStatistics as ScopeStatistics
from ._thread import statistics as statistics

_check()
