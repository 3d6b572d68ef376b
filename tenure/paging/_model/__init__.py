"""A model as paging sees it: tensors by the memory they use, cut into units."""

from ._cut import Cut as Cut
from ._cut import UnitSize as UnitSize
from ._cut import cut as cut
from ._cut import hookable as hookable
from ._cut import sizes_with_own as sizes_with_own
from ._table import TensorTable as TensorTable
from ._table import is_plain as is_plain
from ._table import sizes_of_unpaged as sizes_of_unpaged
from ._units import UNIT_ALIGNMENT_BYTES as UNIT_ALIGNMENT_BYTES
from ._units import Extent as Extent
from ._units import HostTensor as HostTensor
from ._units import Unit as Unit
