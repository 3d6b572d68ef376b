"""Gradients of one attempt, kept apart from those that were there before it."""

from ._gradients import IsolatedGradients as IsolatedGradients
from ._graph_leaves import leaves_of as leaves_of
from ._split_backward import Scaler as Scaler
from ._split_backward import SplitBackward as SplitBackward
from ._split_backward import without_autocast as without_autocast
