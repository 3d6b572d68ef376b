"""A split step: its parts set up, run chunk by chunk in one pass or two."""

from ._checks import checked_spec as checked_spec
from ._chunk_terms import ChunkTerms as ChunkTerms
from ._run import StepOutcome as StepOutcome
from ._setup import StepSetup as StepSetup
from ._spec import BatchNormPolicy as BatchNormPolicy
from ._spec import Chunk as Chunk
from ._spec import StepSpec as StepSpec
from ._state import DeliveredTogether as DeliveredTogether
