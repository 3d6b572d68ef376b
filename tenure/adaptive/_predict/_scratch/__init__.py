"""Memory that a real kernel takes inside one operation, which no fake tensor shows."""

from ._inside import Inside as Inside
from ._inside import inside as inside
