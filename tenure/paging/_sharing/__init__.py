"""Budgets that change: what is free on a device, and what several models share.

`_policy` decides, in numbers; `_gauge` looks at the device; `_budget` asks and gives.
"""

from ._budget import PagingBudget as PagingBudget
from ._budget import Share as Share
from ._budget import shared_budget as shared_budget
