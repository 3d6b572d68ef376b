"""How large the first run is, and how often memory runs out until the size is found."""

from __future__ import annotations

import torch

from benchmarks._record import publish
from benchmarks._size_rows import size_rows


def main() -> None:
    """Count every row and publish the table; nothing in it is timed."""
    torch.set_num_threads(1)
    publish("sizes", size_rows())


if __name__ == "__main__":
    main()
