"""Running models larger than the device: weights that pass through it as they are needed."""

from tenure._errors import PagingError as PagingError
from tenure._errors import PagingWarning as PagingWarning

from ._budget import PagingBudget as PagingBudget
from ._functions import chunk as chunk
from ._functions import load_paged as load_paged
from ._functions import page as page
from ._handle import PagedModel as PagedModel
from ._plan import PagingPlan as PagingPlan
from ._plan import PlannedUnit as PlannedUnit
from ._plan import plan_paging as plan_paging
from ._report import PagingReport as PagingReport
from ._sharded import ShardedModel as ShardedModel
