"""What was recorded, in micro-batches: the plan of a split, and running it by `step`."""

from ._plan import NotSplittableError as NotSplittableError
from ._plan import SplitPlan as SplitPlan
from ._plan import described as described
from ._plan import mixing_call as mixing_call
from ._plan import plan_of as plan_of
from ._program import Program as Program
