"""The simulated memory of a device: errors, segments, and allocators exact or like CUDA's."""

from ._caching import CachingPool as CachingPool
from ._memory import ExactPool as ExactPool
from ._memory import MemoryPool as MemoryPool
from ._memory import check_number as check_number
from ._runtime import ALREADY_REGISTERED as ALREADY_REGISTERED
from ._runtime import CAPTURE_INVALIDATED as CAPTURE_INVALIDATED
from ._runtime import CAPTURE_UNSUPPORTED as CAPTURE_UNSUPPORTED
from ._runtime import INVALID_VALUE as INVALID_VALUE
from ._runtime import NOT_REGISTERED as NOT_REGISTERED
from ._runtime import OUT_OF_MEMORY as OUT_OF_MEMORY
from ._runtime import SUCCESS as SUCCESS
from ._runtime import error_of as error_of
from ._runtime import error_string as error_string
from ._runtime import last_error as last_error
