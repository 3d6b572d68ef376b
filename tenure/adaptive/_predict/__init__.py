"""What work would take, without doing it."""

from ._advice_list import Advice as Advice
from ._advice_list import Advised as Advised
from ._advice_list import advise_with as advise_with
from ._fake_ranks import fake_ranks as fake_ranks
from ._forecast import Forecast as Forecast
from ._predict import predict_peak as predict_peak
from ._report import PeakReport as PeakReport
from ._work import Work as Work
