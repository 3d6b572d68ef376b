"""What `range` and `chunked` share: a first step, and what becomes of the results of the pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._sizes import Remembered
from ._adaptive_function import AdaptiveFunction
from ._collect import Collect, collector_for
from ._options import Options
from ._run import Piece, run_pieces


class PiecesFunction(AdaptiveFunction):
    """A function that works on one piece after the other."""

    _initial_name = "initial_step"

    def __init__(
        self,
        function: Callable[..., Any],
        initial: int | None,
        options: Options,
        *,
        collect: Collect | None,
        progress: bool,
    ) -> None:
        super().__init__(function, initial, options)
        self._collector = collector_for(collect)
        self._progress = progress

    def _run(self, piece: Piece, end: int, initial: int | None, remembered: Remembered) -> Any:
        return run_pieces(
            self._name,
            piece,
            end,
            initial=self._begin(initial),
            options=self._options,
            remembered=remembered,
            collector=self._collector,
            progress=self._progress,
        )
