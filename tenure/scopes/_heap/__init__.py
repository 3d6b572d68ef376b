"""Reading the heap: what refers to what, and how to say it; no code of the objects read runs."""

from ._chains import Chain as Chain
from ._chains import Chains as Chains
from ._frames import RunningFrames as RunningFrames
from ._search import Edge as Edge
from ._search import Search as Search
from ._steps import Step as Step
from ._tensors import storage_key as storage_key
