"""What a failed attempt has changed, noted before it runs and brought back after."""

from ._caches import Caches as Caches
from ._module_state import OF_EVERY_MODULE as OF_EVERY_MODULE
from ._module_state import ModuleState as ModuleState
from ._module_state import modules_below as modules_below
from ._module_state import named_modules as named_modules
from ._notes import ContainerNote as ContainerNote
from ._notes import differing as differing
from ._notes import is_gone as is_gone
from ._notes import noted_container as noted_container
from ._rollback import AllOf as AllOf
from ._rollback import Generator as Generator
from ._rollback import RngState as RngState
from ._rollback import Rollback as Rollback
from ._rollback import generator_kinds as generator_kinds
from ._rollback import generators_in as generators_in
from ._rollback import generators_of as generators_of
from ._rollback import home_of as home_of
from ._rollback import is_library as is_library
