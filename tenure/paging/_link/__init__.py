"""The link between host and device: copies, the streams they run on, and what they waited for."""

from ._disk_link import DiskLink as DiskLink
from ._host_link import HostLink as HostLink
from ._link import Link as Link
from ._meter import PassMeter as PassMeter
from ._meter import PassRecord as PassRecord
