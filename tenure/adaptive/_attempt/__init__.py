"""One attempt at work that may run out of memory: what is let go, told and tried again."""

from ._attempts import Attempts as Attempts
from ._attempts import release as release
from ._events import AdaptiveEvent as AdaptiveEvent
from ._events import AdaptiveStatistics as AdaptiveStatistics
from ._events import OnRetry as OnRetry
from ._events import add_listener as add_listener
from ._events import memory_of as memory_of
from ._events import remove_listener as remove_listener
from ._events import statistics as statistics
