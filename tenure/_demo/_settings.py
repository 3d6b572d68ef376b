"""How large the demo is: the one place for its numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MORE_THAN_THERE_IS = "1EiB"
"""A budget that measures and never refuses."""


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
        steps: training steps of the chapter on learning.
        compared_steps: steps that are run twice, without scopes and with them.
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
    compared_steps: int
    seed: int = 0

    def replace(self, *, steps: int, seed: int) -> Settings:
        """The same with other steps and another seed."""
        return dataclasses.replace(self, steps=steps, seed=seed)


FULL = Settings(
    characters=2_000_000,
    width=128,
    layers=3,
    heads=4,
    window=64,
    batch=24,
    validation_batch=8,
    learning_rate=3e-3,
    steps=300,
    compared_steps=10,
)
QUICK = Settings(
    characters=200_000,
    width=32,
    layers=2,
    heads=2,
    window=32,
    batch=16,
    validation_batch=8,
    learning_rate=1e-2,
    steps=40,
    compared_steps=6,
)
