"""What work would take, without doing it."""

from ._forecast import Forecast as Forecast
from ._predict import predict_peak as predict_peak
from ._report import PeakReport as PeakReport
