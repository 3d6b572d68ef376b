"""The memory that work would take, without running it."""

from ._fake_ranks import fake_ranks as fake_ranks
from ._observer import observer_here as observer_here
from ._predict import Forecast as Forecast
from ._predict import advise_with as advise_with
from ._predict import predict_peak as predict_peak
from ._report import Advice as Advice
from ._report import Advised as Advised
from ._report import PeakReport as PeakReport
from ._work import Work as Work
