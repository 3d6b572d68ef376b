"""The link between host and device: copies, the streams they run on, and who waits there."""

from ._disk_link import DiskLink as DiskLink
from ._host_link import HostLink as HostLink
from ._link import Link as Link
from ._link import Span as Span
