"""Budgets that change: what is free on a device, and what several models share.

`_gauge` looks at the device; `_budget` asks the models for memory and gives it to them.
"""

from ._budget import AUTO as AUTO
from ._budget import PagingBudget as PagingBudget
from ._budget import Share as Share
from ._budget import shared_budget as shared_budget
