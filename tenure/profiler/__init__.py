"""Seeing where memory went and who holds it, and lending the device to others meanwhile."""

from tenure._errors import AwayTensorError as AwayTensorError
from tenure._errors import CourtesyError as CourtesyError
from tenure._errors import CourtesyWarning as CourtesyWarning
from tenure._errors import ProfilerUsageError as ProfilerUsageError
from tenure._errors import ProfilerUsageWarning as ProfilerUsageWarning

from ._census import TensorRow as TensorRow
from ._courtesy import Courtesy as Courtesy
from ._courtesy_report import CourtesyReport as CourtesyReport
from ._courtesy_report import Stay as Stay
from ._display import RecordsDisplay as RecordsDisplay
from ._findings import Finding as Finding
from ._global_profiler import clear_global_line_profiler as clear_global_line_profiler
from ._global_profiler import profile as profile
from ._global_profiler import profile_every as profile_every
from ._global_profiler import set_target_device as set_target_device
from ._global_profiler import set_target_gpu as set_target_gpu
from ._group import GroupReport as GroupReport
from ._holders import HolderList as HolderList
from ._holders import holders as holders
from ._line_profiler import LineProfiler as LineProfiler
from ._mem_report import DeviceReport as DeviceReport
from ._mem_report import MemReport as MemReport
from ._notebook import load_ipython_extension as load_ipython_extension
from ._records import LineRecord as LineRecord
from ._reporter import MemReporter as MemReporter
from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
from ._snapshot import Snapshot as Snapshot
from ._snapshot import SnapshotDiff as SnapshotDiff
from ._snapshot import snapshot as snapshot
