"""Seeing where memory went and who holds it."""

from tenure._errors import ProfilerUsageError as ProfilerUsageError

from ._census import TensorRow as TensorRow
from ._findings import Finding as Finding
from ._group import GroupReport as GroupReport
from ._holders import HolderList as HolderList
from ._holders import holders as holders
from ._mem_report import DeviceReport as DeviceReport
from ._mem_report import MemReport as MemReport
from ._reporter import MemReporter as MemReporter
from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
from ._snapshot import Snapshot as Snapshot
from ._snapshot import SnapshotDiff as SnapshotDiff
from ._snapshot import snapshot as snapshot
