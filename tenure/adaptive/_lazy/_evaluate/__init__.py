"""Computing what was recorded: whole where it fits, else in parts."""

from ._backward import backward as backward
from ._backward import make_whole as make_whole
from ._backward import whole_graph as whole_graph
from ._now import run_now as run_now
from ._values import gradient_of as gradient_of
from ._values import value_of as value_of
