"""While a paged model's forward runs: hooks, the door, and modules that show device tensors.

`_pager` knows who is inside; `_hooks` tell it; `_binding` is what shows; `_door` keeps others out.
"""

from ._arguments import Arguments as Arguments
from ._arguments import moved as moved
from ._attached import Attached as Attached
from ._binding import PagedDict as PagedDict
from ._hooks import Method as Method
from ._hooks import ModuleHooks as ModuleHooks
from ._pager import Pager as Pager
from ._refusals import after_captures as after_captures
from ._refusals import check_capture as check_capture
from ._training_pager import TrainingPager as TrainingPager
