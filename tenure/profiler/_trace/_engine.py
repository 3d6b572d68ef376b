"""The hub of this process, with the best engine that this Python has."""

from __future__ import annotations

from . import _monitoring
from ._monitoring import Monitor
from ._sessions import Engine, Hub
from ._tracing import Tracer
from ._watches import Codes


class _Either:
    """Monitoring, unless other tools have taken every number when the first profiler is enabled."""

    def __init__(self, hub: Hub) -> None:
        self._monitor = Monitor(hub)
        self._tracer = Tracer(hub)
        self._chosen: Engine = self._tracer

    def start(self) -> None:
        self._chosen = self._monitor if self._monitor.take_number() else self._tracer
        self._chosen.start()

    def join(self) -> None:
        self._chosen.join()

    def watch(self, codes: Codes) -> None:
        self._monitor.watch(codes)
        self._tracer.watch(codes)

    def stop(self) -> None:
        self._chosen.stop()


def best_engine(hub: Hub) -> Engine:
    """Tracing, on a Python without ``sys.monitoring``."""
    return Tracer(hub) if _monitoring.monitoring is None else _Either(hub)


the_hub = Hub(best_engine)
"""Where all line profilers are opened. Making it starts nothing."""
