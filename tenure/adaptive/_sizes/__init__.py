"""Sizes of work: which may be tried, which is tried next, and what is remembered of them."""

from ._caches import BatchsizeCache as BatchsizeCache
from ._caches import CacheType as CacheType
from ._caches import GlobalBatchsizeCache as GlobalBatchsizeCache
from ._caches import NoBatchsizeCache as NoBatchsizeCache
from ._caches import StacktraceMemoryBatchsizeCache as StacktraceMemoryBatchsizeCache
from ._caches import checked_cache_type as checked_cache_type
from ._call_site import REMEMBERS_NOTHING as REMEMBERS_NOTHING
from ._call_site import CallSite as CallSite
from ._call_site import RemembersNothing as RemembersNothing
from ._call_site import calling_frame as calling_frame
from ._call_site import check_context as check_context
from ._call_site import memory_for as memory_for
from ._call_site import stands_for as stands_for
from ._file import load as load
from ._file import save as save
from ._learned import reset as reset
from ._limits import NO_LIMITS as NO_LIMITS
from ._limits import SizeLimits as SizeLimits
from ._limits import checked_initial as checked_initial
from ._limits import checked_limits as checked_limits
from ._limits import checked_size as checked_size
from ._search import AdaptiveSearch as AdaptiveSearch
from ._search import Reduce as Reduce
from ._search import Remembered as Remembered
