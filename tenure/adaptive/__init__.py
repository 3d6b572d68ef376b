"""Fitting work into the memory there is."""

from tenure._errors import AdaptiveUsageError as AdaptiveUsageError

from ._budget import memory_budget as memory_budget
