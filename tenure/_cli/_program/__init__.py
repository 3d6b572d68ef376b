"""Another program, run in this process as Python runs it, and recorded meanwhile."""

from ._ends import end_of as end_of
from ._main_module import Program as Program
from ._measuring import Measuring as Measuring
from ._measuring import rank_of_environment as rank_of_environment
from ._recorder import RunRecorder as RunRecorder
