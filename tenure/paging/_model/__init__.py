"""A model as paging sees it: tensors by the memory they use, cut into units."""

from ._cut import Cut as Cut
from ._cut import UnitSize as UnitSize
from ._cut import cut as cut
from ._cut import sizes_with_own as sizes_with_own
from ._kinds import is_plain as is_plain
from ._kinds import made_around as made_around
from ._kinds import parts_of as parts_of
from ._tensors import UNIT_ALIGNMENT_BYTES as UNIT_ALIGNMENT_BYTES
from ._tensors import Extent as Extent
from ._tensors import HostTensor as HostTensor
from ._tensors import TensorTable as TensorTable
from ._tensors import Unit as Unit
