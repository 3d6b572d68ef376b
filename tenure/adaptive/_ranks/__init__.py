"""Ranks that agree: each votes once in a call, however that ends, and none waits for ever."""

from ._call import RankCall as RankCall
from ._call import call_of_ranks as call_of_ranks
from ._call import without_collectives as without_collectives
from ._errors import lost_rank_error as lost_rank_error
from ._group import RankGroup as RankGroup
from ._group import has_other_ranks as has_other_ranks
from ._group import is_rank as is_rank
from ._group import rank_group as rank_group
from ._modules import Replicated as Replicated
from ._modules import has_other_replicas as has_other_replicas
from ._modules import is_first_fsdp as is_first_fsdp
from ._modules import is_sharded as is_sharded
from ._modules import kept_apart as kept_apart
from ._vote import MOST_TERMS as MOST_TERMS
from ._vote import Ballot as Ballot
from ._vote import mark_of as mark_of
