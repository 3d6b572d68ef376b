"""A weight that is read in another way, and used later, has the numbers that it had."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from tenure import DisposedTensorError, NewDisposeScope
from tenure.paging import PagingError, page, plan_paging
from tests.paging.test_zoo import assert_equal, home

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 64
UNIT_BYTES = plan_paging(nn.Linear(WIDTH, WIDTH), "cpu", 1, host=Path()).weight_bytes


class Marked(Tensor):
    """A subclass that acts through ``__torch_function__``."""


class Kept:
    """An object of nobody's."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()


def in_a_closure(weight: Tensor):
    data = weight.data
    return lambda: data


def in_storage(kept):
    storage, offset = kept  # other tensors of the unit may stand before it
    return torch.empty(0, device=storage.device).set_(storage, offset, (WIDTH, WIDTH), (WIDTH, 1))


# Each makes what is kept of a weight, and the tensor to compute with of what was kept.
ALIASES = {
    "detach": (Tensor.detach, lambda kept: kept),
    "data": (lambda weight: weight.data, lambda kept: kept),
    "view": (lambda weight: weight.view(-1), lambda kept: kept.view(WIDTH, WIDTH)),
    "rows of data": (lambda weight: list(weight.data), torch.stack),
    "list": (lambda weight: [{"w": (weight.detach(),)}], lambda kept: kept[0]["w"][0]),
    "object": (Kept, lambda kept: kept.weight),
    "closure": (in_a_closure, lambda kept: kept()),
    "storage": (lambda weight: (weight.untyped_storage(), weight.storage_offset()), in_storage),
    "dlpack": (lambda weight: to_dlpack(weight.detach()), from_dlpack),
    "expand": (lambda weight: weight.data.expand(2, -1, -1), lambda kept: kept[1]),
}
# The simulated device makes no subclasses of tensors that Python has seen.
HOST_ALIASES = {
    "as_subclass": (lambda weight: weight.detach().as_subclass(Marked), lambda kept: kept),
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


class Returning(nn.Module):
    """Gives out what it reads of its weights, in a container of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> dict[str, object]:
        table = self.table.data[:8]
        return {
            "table": table,
            "same": [table],
            "weight": (self.first.weight, self.first.weight.t()),
            "x": self.rest(self.first(x)),
            "late": self.rest[5].bias.detach(),
        }


def assert_safe_after(model, x, expected, run_between):
    """What a pass has returned stays as it was, whatever other passes do."""
    outputs = []
    for _ in range(24):
        outputs.append(model(x))
        run_between()
    for output in outputs:
        assert_equal(home(output), expected)


@pytest.mark.parametrize("share", [0.35, 0.5, 1.0])
def test_from_a_disk_what_a_forward_returns_of_its_weights_stays_right(share, tmp_path):
    torch.manual_seed(0)
    model, x = Returning().eval(), torch.randn(3, WIDTH)
    expected = copy.deepcopy(model(x))
    plan = plan_paging(model, "cpu", 1, host=tmp_path)
    budget = max(plan.minimum_bytes, int(plan.weight_bytes * share))
    with page(model, "cpu", 1, budget=budget, host=tmp_path) as handle:
        assert_safe_after(model, x, expected, lambda: model.rest(x))
        output = model(x)
        assert output["same"][0] is output["table"]
        output["weight"][0].zero_()
        handle.unpage()
    assert_equal(model(x), expected)


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("n_units", [2, 3, 5])
def test_on_a_device_what_was_read_of_a_weight_stays_right(sim, name, n_units):
    model, x = early(*ALIASES[name])
    x = x.to(sim.device)
    expected = copy.deepcopy(model).to(sim.device)(x)
    with page(model, sim.device, 1, budget=n_units * UNIT_BYTES):
        for _ in range(3):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("share", [0.35, 0.5, 1.0])
def test_on_a_device_what_a_forward_returns_of_its_weights_stays_right(sim, share):
    torch.manual_seed(0)
    model, x = Returning().eval(), torch.randn(3, WIDTH)
    expected = home(copy.deepcopy(model).to(sim.device)(x.to(sim.device)))
    plan = plan_paging(model, sim.device, 1)
    with page(model, sim.device, 1, budget=max(plan.minimum_bytes, int(plan.weight_bytes * share))):
        assert_safe_after(model, x, expected, lambda: model.rest(x))


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


class Holding(nn.Module):
    """Reads what it is told before some layer, and uses it after a later one.

    Args:
        widths: of the layers inside.
        readings: each the layer to read, when, how many layers later to use it, and the alias.
    """

    def __init__(self, widths, readings) -> None:
        super().__init__()
        pairs = [(nn.Linear(WIDTH, n), nn.Linear(n, WIDTH)) for n in widths]
        self.layers = nn.ModuleList([nn.Sequential(*pair) for pair in pairs])
        self.square = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in widths])
        self.readings = readings

    def forward(self, x: Tensor) -> Tensor:
        kept: list[tuple[int, str, object]] = []
        for i, layer in enumerate(self.layers):
            for number, at, n_later, name in self.readings:
                if at == i:
                    weight = self.square[number % len(self.square)].weight
                    kept.append((i + n_later, name, (ALIASES | HOST_ALIASES)[name][0](weight)))
                    del weight
            x = torch.tanh(layer(x))
            for _, name, value in [each for each in kept if each[0] <= i]:
                x = x @ (ALIASES | HOST_ALIASES)[name][1](value)
            kept = [each for each in kept if each[0] > i]
        return x


READINGS = st.tuples(
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from([*ALIASES, *HOST_ALIASES]),
)


@pytest.mark.exhaustive
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    widths=st.lists(st.sampled_from([8, 32, 64, 100]), min_size=3, max_size=6),
    readings=st.lists(READINGS, max_size=6),
    percent=st.integers(10, 90),
)
@example(widths=[8, 8, 32, 32, 64, 100], readings=[(1, 0, 0, "storage")], percent=44)
def test_any_model_that_holds_aliases_is_right_or_refused(tmp_path, widths, readings, percent):
    torch.manual_seed(0)
    model, x = Holding(widths, readings).eval(), torch.randn(2, WIDTH)
    expected = model(x)
    plan = plan_paging(model, "cpu", host=tmp_path)
    budget = max(plan.weight_bytes * percent // 100, 3 * UNIT_BYTES)
    for _ in range(9):
        with page(model, "cpu", budget=budget, host=tmp_path):
            try:
                found = [model(x) for _ in range(3)]
            except PagingError as error:
                budget = error.minimum_bytes
                continue
        break
    assert all(torch.equal(each, expected) for each in found)
