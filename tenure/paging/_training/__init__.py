"""Training: weights as part of graphs, fetched again for the backward pass; gradients go home.

`_homeward` takes gradients to the parameters. `_saved` is what a graph keeps of weights, and
`_activations` copies what else it keeps, both ways.
"""

from ._activations import LARGEST_PIECES as LARGEST_PIECES
from ._activations import SMALL_BYTES as SMALL_BYTES
from ._activations import range_to_move as range_to_move
from ._homeward import MOST_UNITS as MOST_UNITS
from ._homeward import Route as Route
from ._saved import SavedTensors as SavedTensors
from ._saved import is_of_checkpoint as is_of_checkpoint
from ._stepping import Stepping as Stepping
from ._stepping import checked_optimizer as checked_optimizer
from ._stepping import needs_all_gradients as needs_all_gradients
from ._stepping import stepped_after as stepped_after
from ._training_engine import TrainingEngine as TrainingEngine
