"""The simulated memory of a device: errors, segments, and allocators exact or like CUDA's."""

from ._caching import CachingPool as CachingPool
from ._memory import MemoryPool as MemoryPool
from ._memory import check_number as check_number
