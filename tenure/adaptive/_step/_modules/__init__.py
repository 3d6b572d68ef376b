"""The modules that a step runs: which they are, their names, whether they mix samples."""

from ..._reachable import Reachable as Reachable
from ..._reachable import StepModels as StepModels
from ..._reachable import generators_of as generators_of
from ..._reachable import modules_given as modules_given
from ..._reachable import named_modules as named_modules
from ..._reachable import named_parameters as named_parameters
from ..._reachable import names_in as names_in
from ..._reachable import used_by as used_by
from ._held_exchange import GradientExchange as GradientExchange
from ._refused import coupled_modules as coupled_modules
from ._refused import no_optimizer_steps as no_optimizer_steps
from ._refused import normalization_error as normalization_error
from ._refused import refuse_coupled as refuse_coupled
from ._refused import refuse_sharded as refuse_sharded
from ._refused import wants_more_samples as wants_more_samples
from ._refused import written_modules as written_modules
