"""`check_split()`, and the verification of a step: micro-batches against the whole."""

from ._compare import SplitDifference as SplitDifference
from ._compare import SplitReport as SplitReport
from ._modes import ConstantNumbers as ConstantNumbers
from ._verification import Verification as Verification
from ._verification import check_split as check_split
