"""How large the demo is: the one place that says so, readable without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of the model and of the work.

    Attributes:
        characters: how many characters of source to read.
        width: features of the model.
        layers: blocks of the model.
        heads: attention heads of a block.
        window: characters that the model sees at once.
        batch: windows in a training batch.
        validation_batch: windows in a validation batch.
        learning_rate: of AdamW.
        steps: training steps of the chapters that compare two runs.
        expected_s: seconds that all of it takes on two idle cores, said before any is measured.
        seed: of the weights and of the batches.
    """

    characters: int
    width: int
    layers: int
    heads: int
    window: int
    batch: int
    validation_batch: int
    learning_rate: float
    steps: int
    expected_s: float
    seed: int = 0

    def replace(self, *, steps: int, seed: int) -> Settings:
        """The same with other steps and another seed."""
        return dataclasses.replace(self, steps=steps, seed=seed)


FULL = Settings(
    characters=400_000,
    width=128,
    layers=3,
    heads=4,
    window=64,
    batch=24,
    validation_batch=8,
    learning_rate=3e-3,
    steps=10,
    expected_s=45,
)
QUICK = Settings(
    characters=100_000,
    width=32,
    layers=2,
    heads=2,
    window=32,
    batch=16,
    validation_batch=8,
    learning_rate=1e-2,
    steps=6,
    expected_s=35,
)
