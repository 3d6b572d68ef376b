"""Who has which storage: modules and optimizers, autograd, variables."""

from ._census import take_census as take_census
from ._holders import HolderList as HolderList
from ._holders import holders as holders
from ._naming import BUFFERS as BUFFERS
from ._naming import OPTIMIZER_STATE as OPTIMIZER_STATE
from ._naming import PARAMETERS as PARAMETERS
from ._naming import outermost as outermost
from ._rows import CATEGORIES as CATEGORIES
from ._rows import GRADIENTS as GRADIENTS
from ._rows import OTHERS as OTHERS
from ._rows import SAVED as SAVED
from ._rows import StorageEntry as StorageEntry
from ._rows import TensorRow as TensorRow
from ._rows import describe_row as describe_row
from ._saved import SavedRecord as SavedRecord
from ._saved import SavedReport as SavedReport
from ._saved import saved_for_backward as saved_for_backward
from ._saved import saved_storages as saved_storages
