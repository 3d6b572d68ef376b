"""Training: weights as part of graphs, fetched again for the backward pass; gradients go home.

`_route` is what a graph has of a weight, `_saved` what it keeps; `_homeward` copies gradients, and
`_activations` what else a graph keeps, both ways.
"""

from ._activation_memory import HostBytes as HostBytes
from ._activations import Activations as Activations
from ._homeward import MOST_UNITS as MOST_UNITS
from ._homeward import Homeward as Homeward
from ._moved import Moved as Moved
from ._route import Route as Route
from ._saved import SavedTensors as SavedTensors
from ._stepping import Stepping as Stepping
from ._stepping import checked_optimizer as checked_optimizer
from ._stepping import needs_all_gradients as needs_all_gradients
from ._stepping import stepped_after as stepped_after
from ._training_engine import TrainingEngine as TrainingEngine
