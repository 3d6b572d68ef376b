"""Plans: what stays, what passes, how near to the limit a model can run, and what is refused."""

from ._checks import Budget as Budget
from ._checks import check_activations as check_activations
from ._checks import check_training as check_training
from ._checks import checked_folder_of_converted as checked_folder_of_converted
from ._checks import checked_host as checked_host
from ._checks import checked_methods as checked_methods
from ._checks import checked_prefetch as checked_prefetch
from ._division import arrange as arrange
from ._division import n_bytes as n_bytes
from ._model_checks import NoAccelerator as NoAccelerator
from ._model_checks import checked_device as checked_device
from ._model_checks import checked_model as checked_model
from ._model_checks import warn_of_uncounted_writes as warn_of_uncounted_writes
from ._plan import DISK as DISK
from ._plan import PCIE_4 as PCIE_4
from ._plan import PagingPlan as PagingPlan
from ._plan import Planned as Planned
from ._plan import PlannedUnit as PlannedUnit
from ._plan import make_plan as make_plan
from ._plan import plan_paging as plan_paging
from ._plan import speed_of as speed_of
