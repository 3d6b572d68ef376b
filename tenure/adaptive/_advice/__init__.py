"""Changes that would lower the peak of a piece of work: each is made, predicted and undone."""

from ._change import WITH_INNER as WITH_INNER
from ._changes import advise as advise
