"""What the allocators of devices and of the host say: counters, caches, bytes of an interval."""

from ._cached_memory import allocator_bytes as allocator_bytes
from ._cached_memory import bytes_of_workspaces as bytes_of_workspaces
from ._cached_memory import cached_memory as cached_memory
from ._device_meter import DeviceAccount as DeviceAccount
from ._device_meter import DeviceMeter as DeviceMeter
from ._fields import Stats as Stats
from ._fields import keep_largest as keep_largest
from ._meters import CpuMeter as CpuMeter
from ._meters import Interval as Interval
from ._meters import Usage as Usage
from ._meters import host_usage as host_usage
from ._meters import unseen_usage as unseen_usage
