"""The story of ``tenure demo``: a transformer trained in scopes, a leak planted in its loop."""

from ._chapters import tell as tell
from ._settings import FULL as FULL
from ._settings import QUICK as QUICK
