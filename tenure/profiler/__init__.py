"""Seeing where memory went and who holds it, and lending the device to others meanwhile."""

from tenure._errors import AwayTensorError as AwayTensorError
from tenure._errors import CourtesyError as CourtesyError
from tenure._errors import CourtesyWarning as CourtesyWarning
from tenure._errors import ProfilerUsageError as ProfilerUsageError
from tenure._errors import ProfilerUsageWarning as ProfilerUsageWarning

from ._courtesy import Courtesy as Courtesy
from ._courtesy import CourtesyReport as CourtesyReport
from ._courtesy import Stay as Stay
from ._lines import LineProfiler as LineProfiler
from ._lines import LineRecord as LineRecord
from ._lines import RecordsDisplay as RecordsDisplay
from ._lines import clear_global_line_profiler as clear_global_line_profiler
from ._lines import load_ipython_extension as load_ipython_extension
from ._lines import profile as profile
from ._lines import profile_every as profile_every
from ._lines import set_target_device as set_target_device
from ._lines import set_target_gpu as set_target_gpu
from ._oom_report import OomLine as OomLine
from ._oom_report import OomRecorder as OomRecorder
from ._oom_report import OomReport as OomReport
from ._oom_report import record_oom as record_oom
from ._owners import HolderList as HolderList
from ._owners import SavedRecord as SavedRecord
from ._owners import SavedReport as SavedReport
from ._owners import TensorRow as TensorRow
from ._owners import holders as holders
from ._owners import saved_for_backward as saved_for_backward
from ._reports import DeviceReport as DeviceReport
from ._reports import Finding as Finding
from ._reports import GroupReport as GroupReport
from ._reports import MemReport as MemReport
from ._reports import MemReporter as MemReporter
from ._reports import Snapshot as Snapshot
from ._reports import SnapshotDiff as SnapshotDiff
from ._reports import snapshot as snapshot
