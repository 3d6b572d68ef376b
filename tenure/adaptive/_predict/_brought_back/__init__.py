"""What work without data is lent, and all that it may change: brought back after it."""

from ._containers import Containers as Containers
from ._containers import holders_in as holders_in
from ._fakes import lent_to_fakes as lent_to_fakes
from ._fakes import mode_for as mode_for
from ._left import FakesLeft as FakesLeft
from ._optimizer import OptimizerState as OptimizerState
from ._settings import settings_kept as settings_kept
from ._shared import check_between_passes as check_between_passes
from ._shared import gradients_kept as gradients_kept
from ._shared import parts_of as parts_of
