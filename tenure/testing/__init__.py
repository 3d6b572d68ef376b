"""A simulated accelerator, `sim:0`, in Python: exact memory, a virtual clock, a race detector.

Test what a program does when device memory runs out, without a GPU. Importing this changes nothing
in torch; the first `simulated_accelerator()` does, once and for the whole process.
"""

from tenure._errors import RaceError as RaceError
from tenure._errors import SimulatorUsageError as SimulatorUsageError

from ._device._clock import Rates as Rates
from ._fault_sweep import AllocationFailure as AllocationFailure
from ._fault_sweep import for_each_allocation as for_each_allocation
from ._simulated_accelerator import simulated_accelerator as simulated_accelerator
from ._simulator import Simulator as Simulator

__all__ = [
    "AllocationFailure",
    "RaceError",
    "Rates",
    "Simulator",
    "SimulatorUsageError",
    "for_each_allocation",
    "simulated_accelerator",
]

for _name in __all__:
    # Where users import it from, for tracebacks and help().
    globals()[_name].__module__ = __name__
