"""Run a model that is larger than the memory it may take, from a safetensors file on the disk."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tenure.adaptive import memory_budget
from tenure.paging import load_paged, plan_paging

WIDTH, LAYERS = 512, 24
BUDGET, LIMIT = "8MiB", "9MiB"


def build() -> nn.Module:
    """A stack of layers; under ``torch.device("meta")`` it takes no memory."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).eval()


def write_weights(path: Path) -> None:
    """The file that a user has; here it is made one layer at a time."""
    torch.manual_seed(0)
    save_file(build().state_dict(), path)


@torch.no_grad()
def main() -> None:
    """Run 24 MiB of weights within 8 MiB, and within 9 MiB all that it takes to run them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_weights(path)
        with torch.device("meta"):
            model = build()
        print(str(plan_paging(model, "cpu", budget=BUDGET, host=path)).partition("\n    ")[0])

        x = torch.ones(4, WIDTH)
        # The limit is for what is paged and for what the model computes, all told.
        with memory_budget(LIMIT) as used, load_paged(model, path, "cpu", budget=BUDGET) as handle:
            outputs = [model(x) for _ in range(3)]
            report = handle.report()
            print(report)
        assert all(output.equal(outputs[0]) for output in outputs)

        # Unpaged, the parameters still lie over the file: what is read of them is read from there.
        assert model(x).equal(outputs[0])
    weights = handle.plan.weight_bytes / 2**20
    paged = (report.resident_bytes + report.ring_bytes) / 2**20
    print(f"{weights:.0f} MiB of weights ran within {paged:.0f} MiB")
    print(f"and {used.peak_bytes / 2**10 - paged * 2**10:.0f} KiB of what they computed")


if __name__ == "__main__":
    main()
