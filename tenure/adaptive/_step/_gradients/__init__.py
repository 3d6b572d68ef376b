"""Gradients of one attempt, kept apart from those that were there before it."""

from ._backward import Scaler as Scaler
from ._backward import SplitBackward as SplitBackward
from ._backward import without_autocast as without_autocast
from ._delegated import Backward as Backward
from ._isolated import IsolatedGradients as IsolatedGradients
from ._isolated import leaves_of as leaves_of
