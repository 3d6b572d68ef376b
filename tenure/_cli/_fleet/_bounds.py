"""The least time that a step can take: what it computes and what it sends, by what is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

from torch.utils.flop_counter import FlopCounterMode

from tenure._torch.flops import OF_THE_CPU
from tenure.adaptive import predict_peak

from ._configured import Configured
from ._setup import Setup
from ._work import Batch, batch_of, making


class Bound(NamedTuple):
    """A lower bound; no forecast.

    Attributes:
        flops: the floating-point operations of a step on one rank, as torch counts them.
        exchanged_bytes: what one rank sends.
        compute_s: the least seconds of computation; None if nobody said how fast the device is.
        link_s: the least seconds of sending; None if nobody said how fast the link is.
    """

    flops: int
    exchanged_bytes: int
    compute_s: float | None
    link_s: float | None

    @classmethod
    def of(
        cls,
        flops: int,
        exchanged_bytes: int,
        flops_per_s: float | None,
        link_bytes_per_s: float | None,
    ) -> Self:
        """Divide by what the device and the link do at most; None: nobody said."""
        return cls(
            flops,
            exchanged_bytes,
            None if flops_per_s is None else flops / flops_per_s,
            None if link_bytes_per_s is None else exchanged_bytes / link_bytes_per_s,
        )

    def words(self) -> str:
        """Spell it."""
        seconds = max(self.compute_s or 0.0, self.link_s or 0.0)
        return (
            f"A step computes {self.flops / 1e12:,.2f} TFLOP and sends "
            f"{self.exchanged_bytes / 1e9:,.2f} GB on each rank: no less than {seconds:.3g} s. "
            "That is a bound, not a forecast."
        )


def flops_of(setup: Setup, found: Configured, device: str) -> int:
    """Count the floating-point operations of a step on one rank.

    Args:
        setup: what runs.
        found: its model.
        device: where, as of `predict_peak`.
    """
    flops = 0
    with making(replace(setup, ranks=1), found) as made:

        def run(batch: Batch) -> None:
            nonlocal flops
            with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as counter:
                output = made.fn(batch)
                if setup.generate is None:
                    output.backward()
            # a prediction leaves the counter as it was
            flops = counter.get_total_flops()

        # tensors without data have no values that the work could look at, except in a prediction
        predict_peak(run, batch_of(setup, found), device=device)
    return flops
