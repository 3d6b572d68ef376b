"""A step that several ranks make together, each with samples of its own."""

from ._planned import PlannedRanks as PlannedRanks
from ._step_ranks import StepRanks as StepRanks
from ._taking_part import taking_part as taking_part
