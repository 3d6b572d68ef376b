"""Line by line: the profiler, its decorators, its tables."""

from ._display import RecordsDisplay as RecordsDisplay
from ._global_profiler import clear_global_line_profiler as clear_global_line_profiler
from ._global_profiler import profile as profile
from ._global_profiler import profile_every as profile_every
from ._global_profiler import set_target_device as set_target_device
from ._global_profiler import set_target_gpu as set_target_gpu
from ._line_profiler import LineProfiler as LineProfiler
from ._notebook import load_ipython_extension as load_ipython_extension
from ._records import LineRecord as LineRecord
