"""The room a model has on the device: which units stay, and the ring the others pass through."""

from ._arrangement import Arrangement as Arrangement
from ._arrangement import arrange as arrange
from ._residency import LinkSpeed as LinkSpeed
from ._residency import Residency as Residency
from ._residency import divide as divide
from ._residency import expected_s as expected_s
from ._residency import minimum_ring_bytes as minimum_ring_bytes
from ._residency import n_bytes as n_bytes
from ._residency import predicted_pass_s as predicted_pass_s
from ._residency import preferred as preferred
from ._residency import smallest as smallest
from ._ring import ByteRing as ByteRing
from ._ring import Fences as Fences
from ._slabs import Place as Place
from ._slabs import Slab as Slab
from ._slabs import joined as joined
from ._slabs import nowhere as nowhere
from ._slabs import places_in as places_in
