"""Pages on the device: when a unit is fetched and goes, where it is, and who waits for its copy.

`_engine` decides when, by what `_pass` expects; `_room` where; `_copies` who waits for what.
"""

from ._composed import Composed as Composed
from ._copies import Copies as Copies
from ._engine import Engine as Engine
from ._memory import Arrangement as Arrangement
from ._memory import ByteRing as ByteRing
from ._memory import Fences as Fences
from ._memory import SlabPlan as SlabPlan
from ._page import RESIDENT as RESIDENT
from ._page import Page as Page
from ._page import in_place_of as in_place_of
from ._page import share_attributes as share_attributes
from ._pass import Forward as Forward
from ._pass import Pass as Pass
from ._pass import Visit as Visit
from ._room import Lease as Lease
from ._room import Room as Room
