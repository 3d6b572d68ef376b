"""A weight that is read in another way, and used later, has the numbers that it had."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from tenure import DisposedTensorError, NewDisposeScope
from tenure.paging import page, plan_paging

from ..models import linears
from ..support import assert_equal, home, whole_output

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 64
UNIT_BYTES = plan_paging(nn.Linear(WIDTH, WIDTH), "cpu", 1, host=Path()).weight_bytes


class Marked(Tensor):
    """A subclass that acts through ``__torch_function__``."""


def in_a_closure(weight: Tensor):
    rows = list(weight.data)
    return lambda: rows


def in_storage(kept):
    storage, offset = kept  # other tensors of the unit may stand before it
    return torch.empty(0, device=storage.device).set_(storage, offset, (WIDTH, WIDTH), (WIDTH, 1))


# Each makes what is kept of a weight, and the tensor to compute with of what was kept.
ALIASES = {
    "detach": (Tensor.detach, lambda kept: kept),
    "data": (lambda weight: weight.data, lambda kept: kept),
    "view": (lambda weight: weight.view(-1), lambda kept: kept.view(WIDTH, WIDTH)),
    "rows in a closure": (in_a_closure, lambda kept: torch.stack(kept())),
    "storage": (lambda weight: (weight.untyped_storage(), weight.storage_offset()), in_storage),
    "dlpack": (lambda weight: to_dlpack(weight.detach()), from_dlpack),
    "expand": (lambda weight: weight.data.expand(2, -1, -1), lambda kept: kept[1]),
}
# The simulated device makes no subclasses of tensors that Python has seen.
HOST_ALIASES = {
    "as_subclass": (lambda weight: weight.detach().as_subclass(Marked), lambda kept: kept),
    "memoryview of numpy": (
        lambda weight: memoryview(weight.detach().numpy()),
        lambda kept: torch.from_numpy(np.asarray(kept)),
    ),
    "numpy by dlpack": (lambda weight: np.from_dlpack(weight.detach()), torch.from_numpy),
}


class Early(nn.Module):
    """Reads a weight before the rest runs, and uses it after."""

    def __init__(self, keep, use) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = linears(6, WIDTH)
        self.keep, self.use = keep, use

    def forward(self, x: Tensor) -> Tensor:
        kept = self.keep(self.first.weight)
        return self.rest(x) @ self.use(kept)


@pytest.mark.parametrize(
    ("device", "name"),
    [*(("cpu", name) for name in ALIASES | HOST_ALIASES), *(("sim", name) for name in ALIASES)],
)
def test_what_was_read_of_a_weight_stays_right(sim, device, name, tmp_path):
    model = Early(*(ALIASES | HOST_ALIASES)[name]).eval()
    x = torch.randn(3, WIDTH).to(device)
    expected = copy.deepcopy(model).to(device)(x)
    host = tmp_path if device == "cpu" else "pinned"
    for n_units in (2, 5):
        with page(model, device, 1, budget=n_units * UNIT_BYTES, host=host):
            for _ in range(3):
                assert torch.equal(model(x), expected)


class Returning(nn.Module):
    """Gives out what it reads of its weights, in a container of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = linears(6, WIDTH)

    def forward(self, x: Tensor) -> dict[str, object]:
        table = self.table.data[:8]
        return {
            "table": table,
            "same": [table],
            "weight": (self.first.weight, self.first.weight.t()),
            "x": self.rest(self.first(x)),
            "late": self.rest[5].bias.detach(),
        }


@pytest.mark.parametrize(
    ("device", "share"), [("cpu", 0.35), ("cpu", 1.0), ("sim", 0.35), ("sim", 1.0)]
)
def test_what_a_forward_returns_of_its_weights_stays_right(sim, device, share, tmp_path):
    model, x = Returning().eval(), torch.randn(3, WIDTH)
    expected = whole_output(device, model, x)
    host = tmp_path if device == "cpu" else "pinned"
    plan, outputs = plan_paging(model, device, 1, host=host), []
    budget = max(plan.minimum_bytes, int(plan.weight_bytes * share))
    with page(model, device, 1, budget=budget, host=host):
        for _ in range(8):
            outputs.append(model(x))
            model.rest(x)
        for output in outputs:
            assert_equal(home(output), expected)
        output = model(x)
        assert output["same"][0] is output["table"]
        output["weight"][0].zero_()
        assert_equal(home(model(x)), expected)
    assert_equal(whole_output(device, model, x), expected)


def test_the_scope_of_the_caller_owns_what_a_forward_returns_of_its_weights(
    tmp_path, nobody_searches
):
    model, x = Returning().eval(), torch.randn(3, WIDTH)
    with page(model, "cpu", 1, budget="60KiB", host=tmp_path):
        with NewDisposeScope():
            table = model(x)["table"]
        with pytest.raises(DisposedTensorError):
            table.sum()
        assert_equal(model(x)["table"], model.table[:8])
