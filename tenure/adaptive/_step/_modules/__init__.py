"""What a step can't just run in parts: modules that mix samples, are sharded, exchange gradients.

Which modules a step has, and their names, is in ``adaptive/_reachable.py``.
"""

from ._held_exchange import GradientExchange as GradientExchange
from ._refused import coupled_modules as coupled_modules
from ._refused import no_optimizer_steps as no_optimizer_steps
from ._refused import normalization_error as normalization_error
from ._refused import refuse_coupled as refuse_coupled
from ._refused import refuse_sharded as refuse_sharded
from ._refused import wants_more_samples as wants_more_samples
from ._refused import written_modules as written_modules
from ._written import WrittenParameters as WrittenParameters
