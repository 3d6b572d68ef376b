"""An out-of-memory error explained: seen as it is raised, its cause, and what to do about it."""

from ._recorder import OomLine as OomLine
from ._recorder import OomRecorder as OomRecorder
from ._recorder import OomReport as OomReport
from ._recorder import record_oom as record_oom
