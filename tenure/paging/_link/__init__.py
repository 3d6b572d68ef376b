"""The link between host and device: copies, the streams they run on, and who waits there."""

from ._file_link import FileLink as FileLink
from ._link import Link as Link
from ._meter import PassRecord as PassRecord
