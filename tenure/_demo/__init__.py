"""The story of ``tenure demo``: a transformer trained in scopes, a leak planted in its loop."""

from ._chapters import tell as tell
from ._subject import FULL as FULL
from ._subject import QUICK as QUICK
