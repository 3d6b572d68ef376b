"""The story of ``tenure demo``: a loop that leaks, work that does not fit, and what tenure does."""

from __future__ import annotations


def tell(*, quick: bool) -> None:
    """Run all chapters; if quick, with a smaller network and fewer steps."""
    # torch takes seconds to import
    print("tenure names what leaks, and makes work fit that does not.", flush=True)
    from ._chapters import tell_chapters

    tell_chapters(quick=quick, n_steps=6 if quick else 10)
