"""How much memory there is, how much of it is in use, and a limit on that."""

from ._budget import memory_budget as memory_budget
from ._budget import set_cpu_memory_limit as set_cpu_memory_limit
from ._counting import counting_on as counting_on
from ._meter import MemoryMeter as MemoryMeter
from ._meter import held_by as held_by
from ._meter import meter_for as meter_for
