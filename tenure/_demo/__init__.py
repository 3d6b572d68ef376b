"""The story of ``tenure demo``: a loop that leaks, work that does not fit, and what tenure does."""

from __future__ import annotations


def tell(*, quick: bool, steps: int | None, seed: int) -> None:
    """Run all chapters.

    Args:
        quick: take a smaller network and fewer steps.
        steps: training steps of each run; None for 10, or 6 if quick.
        seed: of the weights and of the batches.
    """
    # torch takes seconds to import
    print("tenure names what leaks, and makes work fit that does not.", flush=True)
    from ._chapters import tell_chapters

    tell_chapters(quick=quick, n_steps=steps or (6 if quick else 10), seed=seed)
