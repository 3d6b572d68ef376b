"""The work that ``tenure fit`` is asked about: found, made without data, cut into micro-batches."""

from ._micro_batches import MicroBatch as MicroBatch
from ._micro_batches import largest_micro_batch as largest_micro_batch
from ._targets import load_function as load_function
from ._work import in_a_line as in_a_line
from ._work import made_by as made_by
