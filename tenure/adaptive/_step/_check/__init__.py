"""Whether a loss can be split: a few samples whole and in parts, compared."""

from ._check_split import check_split as check_split
from ._compare import DECLARED as DECLARED
from ._compare import EXCHANGED_RTOL as EXCHANGED_RTOL
from ._compare import GRADIENTS as GRADIENTS
from ._compare import LOSSES as LOSSES
from ._compare import is_noise as is_noise
from ._split_report import SplitDifference as SplitDifference
from ._split_report import SplitReport as SplitReport
from ._trial import LeafNames as LeafNames
from ._trial import Trial as Trial
from ._trial import buffers_of as buffers_of
from ._trial import default_rtol as default_rtol
from ._trial import differences as differences
from ._trial import first_module as first_module
from ._trial import trial as trial
