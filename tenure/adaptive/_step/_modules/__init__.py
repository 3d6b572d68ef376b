"""The modules that a step runs: which they are, their names, whether they mix samples."""

from ..._reachable import Reachable as Reachable
from ..._reachable import modules_given as modules_given
from ..._reachable import names_in as names_in
from ..._reachable import used_by as used_by
from ._coupled import coupled_modules as coupled_modules
from ._coupled import normalization_error as normalization_error
from ._coupled import refuse_coupled as refuse_coupled
from ._coupled import refuse_distributed as refuse_distributed
from ._coupled import wants_more_samples as wants_more_samples
from ._coupled import written_modules as written_modules
from ._models import StepModels as StepModels
from ._models import generators_of as generators_of
from ._models import named_modules as named_modules
from ._models import named_parameters as named_parameters
from ._optimizer_guard import no_optimizer_steps as no_optimizer_steps
