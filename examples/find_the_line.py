"""Which line keeps growing? The line profiler names it, and `holders` says who keeps the memory."""

import torch
from torch import nn

from tenure.profiler import LineProfiler, holders, saved_for_backward


class Evaluation:
    """Averages a loss over batches; it keeps each loss, and with it the graph behind it: a leak."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.losses: list[torch.Tensor] = []

    def add(self, batch: torch.Tensor) -> None:
        """Take one batch into account."""
        hidden = self.model(batch)
        loss = hidden.pow(2).mean()
        self.losses.append(loss)


def net_bytes(evaluation: Evaluation) -> int:
    """What five batches leave behind, with the table of the lines printed."""
    batch = torch.ones(64, 128)
    with LineProfiler(type(evaluation).add, device="cpu") as profiler:
        for _ in range(5):
            evaluation.add(batch)
    print(profiler.display(columns=["hits", "net", "peak"]))
    return sum(record.net_bytes for record in profiler.records)


def main() -> None:
    """Find the leak, cure it, and see that nothing is left behind."""
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU())
    evaluation = Evaluation(model)
    left_bytes = net_bytes(evaluation)

    held = evaluation.losses[0]
    print(f"\nOne loss keeps {saved_for_backward(held).total_bytes} bytes of its graph. Held by:")
    names = [name for name in holders(held) if "losses" in name]
    print(*names, sep="\n")
    assert names
    assert left_bytes > 5 * 64 * 256 * 4

    cured = Evaluation(model)
    with torch.no_grad():  # no graph, so a loss is 4 bytes
        left_bytes = net_bytes(cured)
    assert left_bytes == 5 * 4
    print(f"After the cure: {left_bytes} bytes.")


if __name__ == "__main__":
    main()
