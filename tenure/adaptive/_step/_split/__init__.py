"""A split step: its parts set up, run chunk by chunk in one pass or two."""

from ._arguments import BatchNormPolicy as BatchNormPolicy
from ._arguments import StepSpec as StepSpec
from ._arguments import refuse_capture as refuse_capture
from ._function_state import FunctionState as FunctionState
from ._parts import Chunk as Chunk
from ._parts import Divisors as Divisors
from ._parts import StepParts as StepParts
from ._run import StepOutcome as StepOutcome
from ._run import StepRun as StepRun
from ._weighted_terms import ChunkTerms as ChunkTerms
