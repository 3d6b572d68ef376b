"""What `tenure.integrations.lightning` is made of."""

from ._recorder import recorder_of as recorder_of
from ._refused import check_fit as check_fit
from ._training import fitting_step as fitting_step
from ._training import is_trained as is_trained
