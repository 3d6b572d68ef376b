"""The largest micro-batches that fit, known before the work begins."""

from ._plan import plan as plan
from ._report import Plan as Plan
