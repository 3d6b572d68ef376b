"""What was recorded, in order, and running it."""

from ._batch_int import BatchInt as BatchInt
from ._entry import Entry as Entry
from ._entry import Leaf as Leaf
from ._entry import Modes as Modes
from ._entry import Ref as Ref
from ._entry import Verdict as Verdict
from ._entry import leaf_of as leaf_of
from ._entry import makers_of as makers_of
from ._entry import mark_of as mark_of
from ._entry import new_number as new_number
from ._proxies import Reached as Reached
from ._proxies import cut_off as cut_off
from ._proxies import has_graph as has_graph
from ._replay import Replayed as Replayed
from ._replay import filled as filled
from ._replay import flat_tensors as flat_tensors
from ._replay import plain_tensors as plain_tensors
from ._replay import refuse_silence as refuse_silence
from ._replay import replayed as replayed
from ._replay import run as run
from ._replay import written_by as written_by
from ._tape import Tape as Tape
from ._tape import check_unwritten as check_unwritten
