"""What would lower the peak of a piece of work: each change is made, predicted and taken back."""

from ._advise import advise as advise
from ._change import WITH_INNER as WITH_INNER
