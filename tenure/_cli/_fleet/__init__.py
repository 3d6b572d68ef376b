"""Whether a model fits, told from its configuration: no program, no weights, many ranks."""

from ._answer import FleetAnswer as FleetAnswer
from ._answer import answer as answer
from ._setup import Setup as Setup
