"""Seeing where memory went and who holds it."""

from tenure._errors import ProfilerUsageError as ProfilerUsageError

from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
