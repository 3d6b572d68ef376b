"""A simulated accelerator, `sim:0`, in Python: exact memory, a virtual clock, a race detector.

`docs/simulated-device.md` says how to write a test on it. Importing this package changes nothing
in torch; the first use of the `sim` fixture does, once and for the whole process.
"""

from ._fault_sweep import AllocationFailure as AllocationFailure
from ._fault_sweep import for_each_allocation as for_each_allocation
from ._races import RaceError as RaceError
from ._rates import Rates as Rates
from ._simulator import Simulator as Simulator
