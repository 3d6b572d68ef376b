"""Functions of a size, a range or a chunk, run with smaller ones until they fit."""

from ._calls import call_batch as call_batch
from ._calls import call_chunked as call_chunked
from ._calls import call_range as call_range
from ._collect import Collect as Collect
from ._collect import Reducer as Reducer
from ._functions import batch as batch
from ._functions import chunked as chunked
from ._functions import range as range
from ._options import AdaptiveOptions as AdaptiveOptions
from ._options import Options as Options
from ._options import checked_options as checked_options
from ._run import RangePart as RangePart
from ._run import run_pieces as run_pieces
