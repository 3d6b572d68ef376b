"""Functions of a size, a range or a chunk, run with smaller ones until they fit."""

from ._batch import BatchFunction as BatchFunction
from ._batch import batch as batch
from ._chunked import ChunkedFunction as ChunkedFunction
from ._chunked import checked_dimension as checked_dimension
from ._chunked import chunked as chunked
from ._collect import Collect as Collect
from ._collect import Reducer as Reducer
from ._collect import collector_for as collector_for
from ._options import PLAIN as PLAIN
from ._options import AdaptiveOptions as AdaptiveOptions
from ._options import checked_options as checked_options
from ._range import RangeFunction as RangeFunction
from ._range import checked_range as checked_range
from ._range import range as range
from ._run import Chunk as Chunk
from ._run import Piece as Piece
from ._run import run_batch as run_batch
from ._run import run_pieces as run_pieces
