"""Reading the heap: what refers to what, and how to say it; no code of the objects read runs.

Every room's answer to "who holds this tensor" comes from here: `_slots` reads what an object refers
to, and says each reference in words; `_search` looks for who refers to the tensor, and
`_holders` puts the words together to names.
"""

from ._collector import collector_paused as collector_paused
from ._collector import instances as instances
from ._collector import tracked_objects as tracked_objects
from ._collector import wait_for_readers as wait_for_readers
from ._graphs import Graphs as Graphs
from ._graphs import Referent as Referent
from ._graphs import walk_nodes as walk_nodes
from ._holders import IN_CYCLE as IN_CYCLE
from ._holders import Holder as Holder
from ._holders import find_holders as find_holders
from ._holders import weigh_holders as weigh_holders
from ._image import Image as Image
from ._index import Index as Index
from ._reading import cpp_uses as cpp_uses
from ._reading import gradient_of as gradient_of
from ._reading import instance_attributes as instance_attributes
from ._reading import is_kind as is_kind
from ._reading import read as read
from ._reading import read_locals as read_locals
from ._reading import storage_uses as storage_uses
from ._reading import type_name as type_name
from ._words import without_repetitions as without_repetitions
