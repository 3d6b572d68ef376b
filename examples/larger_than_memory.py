"""Run a model that is larger than the memory it may take, from a safetensors file on the disk."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tenure.adaptive import memory_budget
from tenure.paging import load_paged, plan_paging

WIDTH, LAYERS = 512, 24
BUDGET = "8MiB"


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
    """Load and run 24 MiB of weights while no more than 10 MiB of tensors may be alive."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_weights(path)
        with torch.device("meta"):
            model = build()
        print(str(plan_paging(model, "cpu", budget=BUDGET, host=path)).partition("\n    ")[0])

        x = torch.ones(4, WIDTH)
        with memory_budget("10MiB") as memory:
            with load_paged(model, path, "cpu", budget=BUDGET) as handle:
                assert handle.plan.weight_bytes > 2 * memory.limit_bytes
                outputs = [model(x) for _ in range(3)]
                print(handle.report())
            assert all(output.equal(outputs[0]) for output in outputs)

        # Unpaged, the parameters still lie over the file: what is read of them is read from there.
        assert model(x).equal(outputs[0])
    print(f"{LAYERS} layers, at most {memory.peak_bytes / 2**20:.1f} MiB of tensors alive")


if __name__ == "__main__":
    main()
