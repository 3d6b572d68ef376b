"""What `tenure.integrations.transformers` is made of; imports the library."""

from ._callback import MemoryCallback as MemoryCallback
from ._prediction import Batch as Batch
from ._prediction import PredictionInPieces as PredictionInPieces
from ._prediction import UncuttableError as UncuttableError
from ._refused import refuse_class as refuse_class
from ._refused import refuse_training as refuse_training
from ._taken import LossOfBatch as LossOfBatch
from ._taken import losses_taken as losses_taken
from ._taken import only_loss as only_loss
from ._taken import outputs_taken as outputs_taken
from ._ways import mismatch_of as mismatch_of
from ._ways import ways_of as ways_of
from ._ways import weights_of as weights_of
