"""While a paged model's forward runs: entries, and modules that show device tensors.

`_pager` knows who is inside; `_entry` tells it; `_binding` is what shows.
"""

from ._arguments import Arguments as Arguments
from ._arguments import moved as moved
from ._binding import PagedDict as PagedDict
from ._entry import Attached as Attached
from ._entry import Method as Method
from ._pager import Pager as Pager
from ._refusals import after_captures as after_captures
from ._refusals import check_capture as check_capture
from ._training_pager import TrainingPager as TrainingPager
