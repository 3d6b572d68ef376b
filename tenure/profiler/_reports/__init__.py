"""Reports of memory: of a model, of a group of ranks, of one moment, of the time between two."""

from ._findings import Finding as Finding
from ._findings import advice_of_growth as advice_of_growth
from ._findings import cycle_of as cycle_of
from ._findings import keyed_place_of as keyed_place_of
from ._findings import place_of as place_of
from ._mem_report import DeviceReport as DeviceReport
from ._mem_report import MemReport as MemReport
from ._reporter import MemReporter as MemReporter
from ._snapshot import Snapshot as Snapshot
from ._snapshot import SnapshotDiff as SnapshotDiff
from ._snapshot import snapshot as snapshot
