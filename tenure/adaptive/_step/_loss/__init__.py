"""The terms of a loss, and how those of chunks make the whole."""

from ._shares import Shares as Shares
from ._terms import ONLY as ONLY
from ._terms import Count as Count
from ._terms import Reduction as Reduction
from ._terms import Term as Term
from ._terms import Terms as Terms
from ._terms import check_same_terms as check_same_terms
from ._terms import check_weight_is_used as check_weight_is_used
from ._terms import combined as combined
from ._terms import finished_loss as finished_loss
from ._terms import scalar as scalar
from ._terms import terms_of as terms_of
from ._terms import whole_loss as whole_loss
from ._terms import widened as widened
from ._terms import widened_count as widened_count
from ._terms import widest_float as widest_float
