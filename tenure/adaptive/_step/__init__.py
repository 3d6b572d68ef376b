"""A training step in micro-batches, with the gradients of the whole batch."""

from ._check import SplitDifference as SplitDifference
from ._check import SplitReport as SplitReport
from ._check import check_split as check_split
from ._modules import no_optimizer_steps as no_optimizer_steps
from ._split import FunctionState as FunctionState
from ._split import refuse_capture as refuse_capture
from ._step import StepResult as StepResult
from ._step import step as step
