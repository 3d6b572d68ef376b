"""Inside a paged model: while a forward runs, the modules show what is on the device."""

from ._arguments import Arguments as Arguments
from ._arguments import moved as moved
from ._binding import Binding as Binding
from ._binding import PagedDict as PagedDict
from ._entry_points import EntryPoint as EntryPoint
from ._entry_points import Method as Method
from ._entry_points import checked_methods as checked_methods
from ._hooks import ModuleHooks as ModuleHooks
from ._pager import Pager as Pager
from ._refusals import after_captures as after_captures
from ._refusals import check_capture as check_capture
