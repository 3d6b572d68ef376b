"""Where tensors have their samples: found on tensors without data, operator by operator."""

from ._label import MIXED as MIXED
from ._label import SHARED as SHARED
from ._label import Label as Label
from ._label import label_of as label_of
from ._label import set_label as set_label
from ._label_mode import LabelMode as LabelMode
