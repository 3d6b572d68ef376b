"""Seeing where memory went and who holds it, and lending the device to others meanwhile."""

from tenure._errors import AwayTensorError as AwayTensorError
from tenure._errors import CourtesyError as CourtesyError
from tenure._errors import CourtesyWarning as CourtesyWarning

from ._courtesy import Courtesy as Courtesy
from ._courtesy_report import CourtesyReport as CourtesyReport
from ._courtesy_report import Stay as Stay
