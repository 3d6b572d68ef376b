"""Live memory over time: recorded, thinned with its maxima kept, written for other tools."""

from ._export import WRITERS as WRITERS
from ._export import Writer as Writer
from ._export import write_as_named as write_as_named
from ._timeline import Timeline as Timeline
from ._timeline_report import DeviceTimeline as DeviceTimeline
from ._timeline_report import HostTimeline as HostTimeline
from ._timeline_report import OomMark as OomMark
from ._timeline_report import PeakRow as PeakRow
from ._timeline_report import ScopeSpan as ScopeSpan
from ._timeline_report import TimelineReport as TimelineReport
from ._timeline_report import Track as Track
from ._timeline_report import summed as summed
