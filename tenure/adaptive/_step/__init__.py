"""A training step in micro-batches, with the gradients of the whole batch."""

from ._arguments import BatchNormPolicy as BatchNormPolicy
from ._arguments import StepSpec as StepSpec
from ._arguments import refuse_capture as refuse_capture
from ._at_size import SizedStep as SizedStep
from ._at_size import step_at_size as step_at_size
from ._gradients import IsolatedGradients as IsolatedGradients
from ._gradients import leaves_of as leaves_of
from ._loss import Reduction as Reduction
from ._modules import no_optimizer_steps as no_optimizer_steps
from ._parts import FunctionState as FunctionState
from ._samples import SampleDims as SampleDims
from ._samples import SampleTree as SampleTree
from ._split import StepOutcome as StepOutcome
from ._step import StepOptions as StepOptions
from ._step import StepResult as StepResult
from ._step import run_step as run_step
from ._step import step as step
from ._verify import ConstantNumbers as ConstantNumbers
from ._verify import SplitDifference as SplitDifference
from ._verify import SplitReport as SplitReport
from ._verify import check_split as check_split
