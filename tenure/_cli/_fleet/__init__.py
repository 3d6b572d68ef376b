"""Predict a model from its configuration alone: no program, no weights, many ranks."""

from ._answer import FleetAnswer as FleetAnswer
from ._answer import answer as answer
from ._setup import Setup as Setup
