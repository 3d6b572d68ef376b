"""Line by line: the profiler, its decorators, its magics, its tables."""

from ._decorators import clear_global_line_profiler as clear_global_line_profiler
from ._decorators import profile as profile
from ._decorators import profile_every as profile_every
from ._decorators import set_target_device as set_target_device
from ._decorators import set_target_gpu as set_target_gpu
from ._display import LineRecord as LineRecord
from ._display import RecordsDisplay as RecordsDisplay
from ._line_profiler import LineProfiler as LineProfiler
from ._mlrun import load_ipython_extension as load_ipython_extension
from ._mlrun import unload_ipython_extension as unload_ipython_extension
