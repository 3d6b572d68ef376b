"""The host's side of a paged model: buffers, pinned memory, files."""

from ._file_store import FileStore as FileStore
from ._file_store import HostStore as HostStore
from ._file_store import SpillStore as SpillStore
from ._file_store import checked_folder as checked_folder
from ._file_store import nameless as nameless
from ._file_store import writing as writing
from ._host_buffers import HostBuffers as HostBuffers
from ._mapped_file import MappedFile as MappedFile
from ._pinning import Pinning as Pinning
from ._reader import Done as Done
from ._reader import Reader as Reader
from ._reader import raise_anew as raise_anew
