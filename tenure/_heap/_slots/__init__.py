"""What an object refers to, slot by slot, read without running code of the object."""

from ._arrays import array_class as array_class
from ._arrays import holds_objects as holds_objects
from ._arrays import is_array as is_array
from ._arrays import referents_of as referents_of
from ._slots import slots_of as slots_of
from ._suspended import frame_of as frame_of
from ._suspended import root_of_context as root_of_context
