"""What was recorded, in micro-batches: the plan of a split, and running it by `step`."""

from ._groups import written_groups as written_groups
from ._program import Program as Program
from ._split_plan import NotSplittableError as NotSplittableError
from ._split_plan import SplitPlan as SplitPlan
from ._split_plan import described as described
from ._split_plan import mixing_call as mixing_call
from ._split_plan import plan_of as plan_of
from ._split_step import SplitStep as SplitStep
from ._split_values import SplitValues as SplitValues
