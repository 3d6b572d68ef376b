"""Checkpoints on disk: which files, which tensors, under which names and in which form."""

from ._assigned import assigned as assigned
from ._converted import convert_names as convert_names
from ._files import open_checkpoint as open_checkpoint
