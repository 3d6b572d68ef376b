"""Seeing where memory went and who holds it, and lending the device to others meanwhile."""

from tenure._errors import AwayTensorError as AwayTensorError
from tenure._errors import CourtesyError as CourtesyError
from tenure._errors import CourtesyWarning as CourtesyWarning
from tenure._errors import ProfilerUsageError as ProfilerUsageError

from ._courtesy import Courtesy as Courtesy
from ._courtesy_report import CourtesyReport as CourtesyReport
from ._courtesy_report import Stay as Stay
from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
