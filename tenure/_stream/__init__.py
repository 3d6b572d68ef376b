"""Allocations as events: a stream for each thread, with marks; the device's counters elsewhere."""

from ._counters import Allocated as Allocated
from ._counters import allocated_on as allocated_on
from ._modes import run as run
from ._modes import storages_in as storages_in
from ._stream import AllocationStream as AllocationStream
from ._stream import Consumer as Consumer
from ._stream import ThisThread as ThisThread
from ._stream import process as process
from ._stream import this_stream as this_stream
