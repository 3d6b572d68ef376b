"""A weight that is read in another way, and used later, has the numbers that it had."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from tenure.paging import PagingError, page, plan_paging
from tests.paging.test_zoo import assert_equal, home

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 64
UNIT_BYTES = plan_paging(
    nn.Linear(WIDTH, WIDTH), "cpu", 1, host=__import__("pathlib").Path()
).weight_bytes


class Marked(Tensor):
    """A subclass that acts through ``__torch_function__``."""


class Kept:
    """An object of nobody's."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()


def in_a_closure(weight: Tensor):
    data = weight.data
    return lambda: data


# Each makes what is kept of a weight, and the tensor to compute with of what was kept.
ALIASES = {
    "detach": (Tensor.detach, lambda kept: kept),
    "data": (lambda weight: weight.data, lambda kept: kept),
    "view": (lambda weight: weight.view(-1), lambda kept: kept.view(WIDTH, WIDTH)),
    "rows of data": (lambda weight: list(weight.data), torch.stack),
    "as_subclass": (lambda weight: weight.detach().as_subclass(Marked), lambda kept: kept),
    "list": (lambda weight: [{"w": (weight.detach(),)}], lambda kept: kept[0]["w"][0]),
    "object": (Kept, lambda kept: kept.weight),
    "closure": (in_a_closure, lambda kept: kept()),
    "storage": (
        Tensor.untyped_storage,
        lambda kept: torch.empty(0, device=kept.device).set_(kept, 0, (WIDTH, WIDTH), (WIDTH, 1)),
    ),
    "dlpack": (lambda weight: to_dlpack(weight.detach()), from_dlpack),
    "expand": (lambda weight: weight.data.expand(2, -1, -1), lambda kept: kept[1]),
}
HOST_ALIASES = {
    "numpy": (lambda weight: weight.detach().numpy(), torch.from_numpy),
    "memoryview": (
        lambda weight: memoryview(weight.detach().numpy()),
        lambda kept: torch.from_numpy(np.asarray(kept)),
    ),
    "rows of numpy": (
        lambda weight: list(weight.detach().numpy()),
        lambda kept: torch.from_numpy(np.stack(kept)),
    ),
    "numpy by dlpack": (lambda weight: np.from_dlpack(weight.detach()), torch.from_numpy),
    "frombuffer": (
        lambda weight: torch.frombuffer(weight.detach().numpy(), dtype=torch.float32),
        lambda kept: kept.view(WIDTH, WIDTH),
    ),
}


class Early(nn.Module):
    """Reads a weight before the rest runs, and uses it after."""

    def __init__(self, keep, use) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.keep, self.use = keep, use

    def forward(self, x: Tensor) -> Tensor:
        kept = self.keep(self.first.weight)
        return self.rest(x) @ self.use(kept)


def early(keep, use):
    torch.manual_seed(0)
    return Early(keep, use).eval(), torch.randn(3, WIDTH)


@pytest.mark.parametrize("kib", [40, 52, 70])
@pytest.mark.parametrize("name", [*ALIASES, *HOST_ALIASES])
def test_from_a_disk_what_was_read_of_a_weight_stays_right(name, kib, tmp_path):
    model, x = early(*(ALIASES | HOST_ALIASES)[name])
    expected = model(x)
    with page(model, "cpu", 1, budget=f"{kib}KiB", host=tmp_path):
        for _ in range(3):
            assert torch.equal(model(x), expected)
