"""One attempt at work that may run out of memory: what is undone, what is let go, what is told."""

from ._attempts import Attempts as Attempts
from ._buffer_state import BufferState as BufferState
from ._cpu_fallback import on_cpu as on_cpu
from ._events import AdaptiveEvent as AdaptiveEvent
from ._events import AdaptiveStatistics as AdaptiveStatistics
from ._events import OnRetry as OnRetry
from ._events import add_listener as add_listener
from ._events import remove_listener as remove_listener
from ._events import statistics as statistics
from ._events import tell as tell
from ._module_state import ModuleState as ModuleState
from ._modules import modules_below as modules_below
from ._release import release as release
from ._rng_state import Generator as Generator
from ._rng_state import RngState as RngState
from ._rng_state import generator_kinds as generator_kinds
from ._rng_state import generators_in as generators_in
from ._rollback import Rollback as Rollback
from ._rollback import Together as Together
from ._tensor_notes import is_gone as is_gone
