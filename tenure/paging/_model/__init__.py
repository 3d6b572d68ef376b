"""A model as paging sees it: tensors by the memory they use, cut into units."""

from ._table import Extent as Extent
from ._table import HostTensor as HostTensor
from ._table import TensorTable as TensorTable
from ._table import is_plain as is_plain
from ._table import sizes_of_unpaged as sizes_of_unpaged
from ._units import UNIT_ALIGNMENT_BYTES as UNIT_ALIGNMENT_BYTES
from ._units import Cut as Cut
from ._units import Unit as Unit
from ._units import UnitSize as UnitSize
from ._units import cut as cut
from ._units import hookable as hookable
from ._units import sizes_with_own as sizes_with_own
