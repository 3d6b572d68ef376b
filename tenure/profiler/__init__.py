"""Seeing where memory went and who holds it."""

from tenure._errors import ProfilerUsageError as ProfilerUsageError
from tenure._errors import ProfilerUsageWarning as ProfilerUsageWarning

from ._census import TensorRow as TensorRow
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
from ._records import LineRecord as LineRecord
from ._reporter import MemReporter as MemReporter
from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
from ._snapshot import Snapshot as Snapshot
from ._snapshot import SnapshotDiff as SnapshotDiff
from ._snapshot import snapshot as snapshot
