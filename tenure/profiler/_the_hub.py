"""The hub of this process, with the best engine that this Python has."""

from __future__ import annotations

from ._hub import Engine, Hub
from ._monitoring import Monitor, free_tool
from ._tracing import Tracer


def _engine(hub: Hub) -> Engine:
    """Monitoring, unless this Python has none or other tools have taken every number."""
    tool = free_tool()
    return Tracer(hub) if tool is None else Monitor(hub, tool)


the_hub = Hub(_engine)
"""Where all line profilers are opened. Making it starts nothing."""
