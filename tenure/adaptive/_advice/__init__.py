"""What would lower the peak of a piece of work: each change is made, predicted and taken back."""

from ._change import WITH_INNER as WITH_INNER
from ._changes import advise as advise
