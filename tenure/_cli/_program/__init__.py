"""Another program, run in this process as Python runs it, and recorded meanwhile."""

from ._ends import end_of as end_of
from ._main_module import Program as Program
from ._main_module import code_program as code_program
from ._main_module import module_program as module_program
from ._main_module import script_program as script_program
from ._measuring import Measuring as Measuring
from ._measuring import rank_of_environment as rank_of_environment
from ._recorder import RunRecorder as RunRecorder
