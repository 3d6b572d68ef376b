"""Reading the heap: what refers to what, and how to say it; no code of the objects read runs.

Every room's answer to "who holds this tensor" comes from here.
"""

from ._holders import Holder as Holder
from ._holders import find_holders as find_holders
from ._tensors import storage_key as storage_key
