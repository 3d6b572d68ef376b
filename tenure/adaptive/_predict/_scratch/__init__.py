"""Memory that a real kernel takes inside one operation, which no fake tensor shows."""

from ._scratch import Scratch as Scratch
from ._scratch import scratch_bytes as scratch_bytes
