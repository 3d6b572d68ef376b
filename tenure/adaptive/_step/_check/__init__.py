"""`check_split()`: whether a loss can be split, as users ask it; and how two runs are compared."""

from ._check_split import check_split as check_split
from ._compare import DECLARED as DECLARED
from ._compare import EXCHANGED_RTOL as EXCHANGED_RTOL
from ._compare import GRADIENTS as GRADIENTS
from ._compare import IT_IS_A_SUM as IT_IS_A_SUM
from ._compare import LOSSES as LOSSES
from ._compare import SplitDifference as SplitDifference
from ._compare import SplitReport as SplitReport
from ._compare import is_noise as is_noise
from ._observed import LeafNames as LeafNames
from ._observed import Observed as Observed
from ._observed import buffers_of as buffers_of
from ._observed import default_rtol as default_rtol
from ._observed import differences as differences
from ._observed import first_module as first_module
from ._observed import mixed_input as mixed_input
from ._observed import observed_run as observed_run
from ._observed import without_dropout as without_dropout
