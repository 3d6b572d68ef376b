"""Sizes of work: which may be tried, which is tried next, and what is remembered of them.

`_search` is the state of one call, `_model` what is known of one piece of work, and which size
follows. `_learned` has all such models and their file, `_remembered` is how a call finds its own.
"""

from ._learned import load as load
from ._learned import reset as reset
from ._learned import save as save
from ._model import SizeModel as SizeModel
from ._model import SizeRange as SizeRange
from ._predicted import largest_predicted as largest_predicted
from ._remembered import BatchsizeCache as BatchsizeCache
from ._remembered import CacheType as CacheType
from ._remembered import GlobalBatchsizeCache as GlobalBatchsizeCache
from ._remembered import NoBatchsizeCache as NoBatchsizeCache
from ._remembered import RememberedCall as RememberedCall
from ._remembered import StacktraceMemoryBatchsizeCache as StacktraceMemoryBatchsizeCache
from ._remembered import calling_frame as calling_frame
from ._remembered import check_context as check_context
from ._remembered import checked_cache_type as checked_cache_type
from ._remembered import stands_for as stands_for
from ._search import AdaptiveSearch as AdaptiveSearch
from ._search import SizeLimits as SizeLimits
from ._search import checked_initial as checked_initial
from ._search import checked_limits as checked_limits
from ._search import checked_size as checked_size
