"""Values of what was recorded, put together of parts that run without gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tenure._text import listed
from tenure.scopes import persist

from ._gathered import Gathered
from ._program import Program


class SplitValues:
    """The values that somebody has, computed part by part.

    Args:
        program: what was recorded.

    Attributes:
        values: they, by number, after `finish`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._gathered: dict[int, Gathered] = {}
        self.values: dict[int, Tensor] = {}

    def piece(self, start: int, end: int, *_: Any) -> None:
        """Run a part of the batch."""
        program = self._program
        with torch.no_grad():
            env, length = program.env(program.part(start, end))
            program.run_chunk(env, length)
            for number in program.kept:
                if number not in self._gathered:
                    label = program.labels[number]
                    self._gathered[number] = Gathered(label, program.tape.n_samples)
                self._gathered[number].add(env[number], start, length)

    def finish(self) -> None:
        """All parts ran."""
        with torch.no_grad(), persist():
            env = {n: gathered.value() for n, gathered in self._gathered.items()}
            self.values = env | self._program.late(self._program.plan.others, dict(env))

    def let_go(self) -> None:
        """Of what was put together so far."""
        self._gathered.clear()

    def wanted_bytes(self) -> tuple[int, str]:
        """What the values that somebody wants take, put together, and what they are."""
        plan, handles = self._program.plan, self._program.tape.handles
        entries = [*plan.chunk, *plan.others]
        metas = {n: m for e in entries for n, m in zip(e.made, e.shape.metas, strict=True)}
        wanted = {n: m for n, m in metas.items() if n in self._program.kept or n in handles}
        sizes = {n: math.prod(m.shape) * m.dtype.itemsize for n, m in wanted.items()}
        first = sorted(wanted, key=lambda n: -sizes[n])
        shapes = [f"{str(wanted[n].dtype)[6:]}{list(wanted[n].shape)}" for n in first]
        return sum(sizes.values()), listed(shapes, most=3)
