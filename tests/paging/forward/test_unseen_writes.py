"""Writes in a forward that raise no version reach the model as all others do."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tenure.paging import PagingError, page, plan_paging

from ..support import about_values, assert_equal, home

pytestmark = [about_values, pytest.mark.usefixtures("without_gradients")]

WIDTH = 64


def set_what_it_is(weight: Tensor) -> None:
    weight.data *= 0.5
    weight.data = weight.detach()


WRITES = {
    # as helpers of quantizers do
    "decay": lambda weight: weight.data.mul_(0.5),
    "set to what it is": set_what_it_is,
    "view": lambda weight: weight[3:5].data.zero_(),
}
ON_HOST = WRITES | {"numpy": lambda weight: weight.detach().numpy()[2].fill(0.5)}


class Codebook(nn.Module):
    """Changes weights of its own and of a child while it runs."""

    def __init__(self, write) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("counts", torch.randn(WIDTH, WIDTH))
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest(x @ self.codes @ self.counts)
        for weight in (self.codes, self.counts, self.rest[2].weight):
            self.write(weight)
        return torch.tanh(y @ self.codes)


def codebook(write):
    return Codebook(write).eval(), torch.randn(3, WIDTH)


@pytest.mark.parametrize("percent", [0, 100])
@pytest.mark.parametrize(
    ("device", "from_disk", "write"),
    [
        *(("cpu", True, write) for write in ON_HOST),
        *(("sim", from_disk, write) for from_disk in (False, True) for write in WRITES),
    ],
)
def test_they_reach_the_model(sim, device, from_disk, percent, write, tmp_path):
    model, x = codebook(ON_HOST[write])
    host = tmp_path if from_disk else "pinned"
    plan = plan_paging(model, device, 1, host=host)
    budget = max(plan.minimum_bytes + 2 * WIDTH**2 * 4, plan.weight_bytes * percent // 100)
    whole, there = copy.deepcopy(model).to(device), x.to(device)
    with page(model, device, 1, budget=budget, host=host):
        for _ in range(3):
            assert_equal(home(model(x)), home(whole(there)))
            assert_equal(model.state_dict(), home(whole.state_dict()))
            assert_equal(home(model.rest(x)), home(whole.rest(there)))
    assert_equal(model.state_dict(), home(whole.state_dict()))


def test_an_alias_that_is_kept_is_watched_as_long_as_it_lives(tmp_path):
    kept = []
    model, x = codebook(lambda weight: kept or kept.append(weight.data))
    model.register_forward_hook(lambda *_: kept[0].mul_(0.5))
    whole = copy.deepcopy(model)
    with page(model, "cpu", 1, budget="100KiB", host=tmp_path):
        for _ in range(3):
            model(x)
    expected = whole.codes * 0.5**3
    assert_equal(model.codes, nn.Parameter(expected, requires_grad=False))


OTHER_MEMORY = {
    "data": (lambda w: w.data * 0.5, r"^'codes' was given float32\[64, 64\].* through .data"),
    "turned data": (lambda w: w.data.t(), r"^'codes' was given float32\[64, 64\].* through .data"),
    "half": (lambda w: w.data[:8].half(), r"^'codes' was given float16\[8, 64\].* through .data"),
}
SET = r"^set_\(\) was called of 'codes'"
PAST = r"^'.*' was given other memory or another form in"


def give(make):
    def write(weight):
        weight.data = make(weight)

    return write


@pytest.mark.parametrize("where", ["inference", "training", "on a disk"])
@pytest.mark.parametrize(
    ("write", "told"),
    [
        *[(give(make), told) for make, told in OTHER_MEMORY.values()],
        (lambda weight: weight.set_(weight * 2), SET),
        (lambda weight: weight.set_(), SET),
        (lambda w: Tensor.set_(w, w * 2), PAST),
        (lambda w: Tensor.data.__set__(w, w.data * 2), PAST),
        (Tensor.t_, PAST),
    ],
    ids=[*OTHER_MEMORY, "set_", "emptied", "set_ of the class", "data of the class", "t_"],
)
def test_other_memory_that_is_given_in_the_forward_is_refused_and_nothing_changes(
    sim, tmp_path, where, write, told
):
    model, x = codebook(lambda weight: None)
    before = copy.deepcopy(model.state_dict())
    options = {"host": tmp_path} if where == "on a disk" else {"training": where == "training"}
    device = "cpu" if where == "on a disk" else sim.device
    with page(model, device, 1, budget="100KiB", **options):
        expected = model(x)
        model.write = write
        with pytest.raises(PagingError, match=told):
            model(x)
        model.write = lambda weight: None
        assert torch.equal(model(x), expected)
        assert_equal(model.state_dict(), before)
    assert_equal(model.state_dict(), before)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how:UserWarning")  # of a graph break
def test_a_compiled_block_that_reads_data_computes_the_same(tmp_path):
    model, x = codebook(WRITES["decay"])
    whole = copy.deepcopy(model)
    for each in (model, whole):
        each.rest.compile(backend="eager")
    # what is compiled is needed at once
    with page(model, "cpu", 1, budget="130KiB", host=tmp_path):
        for _ in range(2):
            assert_equal(model(x), whole(x))
