"""Who gives memory back when work runs out of it, and who names what is kept.

Private: a retry asks for what its error names, and a test wants to choose the bytes, and who lends.
"""

from tenure._registries import Shrinkable as Shrinkable
from tenure._registries import ask_to_shrink as ask_to_shrink
from tenure._registries import namers as namers
from tenure._registries import shrinkables as shrinkables
