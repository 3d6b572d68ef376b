"""A split step: its parts set up, run chunk by chunk in one pass or two."""

from ._arguments import BatchNormPolicy as BatchNormPolicy
from ._arguments import StepSpec as StepSpec
from ._parts import Chunk as Chunk
from ._parts import DeliveredTogether as DeliveredTogether
from ._parts import StepParts as StepParts
from ._run import StepOutcome as StepOutcome
from ._run import StepRun as StepRun
from ._terms_pass import ChunkTerms as ChunkTerms
