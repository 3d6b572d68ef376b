"""What `tenure.integrations.lightning` is made of."""

from ._callback import MemoryCallback as MemoryCallback
from ._callback import check_installed as check_installed
from ._recorder import recorder_of as recorder_of
from ._refused import MARK as MARK
from ._refused import check_fit as check_fit
from ._training import fitting_step as fitting_step
from ._training import is_trained as is_trained
