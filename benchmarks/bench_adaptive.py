"""What retries cost, against toma; and what an exact split costs."""

from __future__ import annotations

import torch

from benchmarks._record import publish
from benchmarks._step_rows import step_rows
from benchmarks._toma_rows import toma_rows


def main() -> None:
    """Measure every row and publish the table."""
    torch.set_num_threads(1)  # so that the time of the process is that of the work
    publish("adaptive", [*toma_rows(), *step_rows()])


if __name__ == "__main__":
    main()
