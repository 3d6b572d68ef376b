"""A training step in micro-batches, with the gradients of the whole batch."""

from ._check_split import check_split as check_split
from ._split_report import SplitDifference as SplitDifference
from ._split_report import SplitReport as SplitReport
from ._step import StepResult as StepResult
from ._step import step as step
