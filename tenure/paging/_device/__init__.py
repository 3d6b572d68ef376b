"""The device's side of a paged model: pages, which come before they are used and go after."""

from ._engine import Engine as Engine
from ._page import RESIDENT as RESIDENT
from ._page import Page as Page
from ._page import in_place_of as in_place_of
from ._ring import ByteRing as ByteRing
from ._slabs import Arrangement as Arrangement
from ._slabs import SlabPlan as SlabPlan
from ._unpaged import UnpagedTensors as UnpagedTensors
