"""Memory that a real kernel takes inside one operation, which no fake tensor shows."""

from ._recurrent import rnn_workspace_bytes as rnn_workspace_bytes
from ._scratch import Scratch as Scratch
from ._scratch import scratch_bytes as scratch_bytes
