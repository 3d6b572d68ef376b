"""What programs do to weights between calls: write, exchange, average, tie or transpose them."""

import copy

import pytest
import torch

from tenure.paging import PagingError, chunk, load_paged, page

from .models import linears
from .support import about_values, assert_equal, saved

pytestmark = about_values

WIDTH = 16
UNIT_BYTES = 2048
LEAST = 2 * UNIT_BYTES


def in_all(write):
    """A change of each of some weights by itself."""

    def change(*weights):
        for weight in weights:
            write(weight)

    return change


def rotate(a, b, c):
    a.data, b.data, c.data = b.data, c.data, a.data


def transpose(a, b, _):
    a.data = a.data.t()


def take_the_transposed(a, b, _):
    b.data = a.data.t()
    a.data = torch.zeros_like(a.data)


def layers():
    made = linears(4, WIDTH).train()
    # whole numbers, whose sums are the same in any order: a transposed weight has another one
    for each in made.parameters():
        each.data = torch.randint(-2, 3, each.shape).float()
    return made


def run(model, device):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=device)).cpu()


def assert_same(ours, theirs, device):
    assert run(ours, device).equal(run(copy.deepcopy(theirs).to(device), device))
    assert_equal(list(ours.parameters()), list(theirs.parameters()))


def from_file(model, folder, budget):
    return load_paged(model, saved(model, folder / "m.safetensors"), "cpu", 1, budget=budget)


ALL = 4 * (WIDTH + 1) * WIDTH
PLACES = {
    "chunk": lambda model, sim, _: chunk(model, sim.device, ALL // 2),
    "one unit": lambda model, sim, _: page(model, sim.device, ALL),
    "inference mode": lambda model, sim, _: page(model, sim.device, 1, budget=LEAST),
    "trained": lambda model, sim, _: page(model, sim.device, 1, budget=LEAST, training=True),
    "disk": lambda model, sim, folder: page(model, sim.device, 1, budget=LEAST, host=folder),
    "folder": lambda model, sim, folder: page(model, "cpu", 1, budget="1MiB", host=folder),
    "folder, passing": lambda model, sim, folder: page(model, "cpu", 1, budget=LEAST, host=folder),
    "file": lambda model, sim, folder: from_file(model, folder, "1MiB"),
    "file, passing": lambda model, sim, folder: from_file(model, folder, LEAST),
}
CHANGES = {
    "by the version": in_all(lambda weight: weight.mul_(0.5)),
    # as helpers of quantizers do
    "past the version": in_all(lambda weight: weight.data.mul_(0.5)),
    "by numpy": in_all(lambda weight: weight.detach().numpy()[2].fill(0.5)),
    "other data": in_all(lambda weight: setattr(weight, "data", weight.detach() * 2)),
    "rotated": rotate,
    "swapped": lambda a, b, _: torch.utils.swap_tensors(a, b),
}
# a weight of another layout has no place in a file
TURNED = {"transposed": transpose, "taken": take_the_transposed}


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize(
    ("where", "change"),
    [
        *((where, change) for where in PLACES for change in CHANGES),
        *((where, change) for where in [*PLACES][:4] for change in TURNED),
    ],
)
def test_what_is_done_to_weights_is_done_to_those_of_the_plain_model(sim, where, change, tmp_path):
    model = layers()
    plain = copy.deepcopy(model)
    # of objects that the program has from before
    weights = [[layer.weight for layer in each[:3]] for each in (model, plain)]
    with torch.inference_mode() if where == "inference mode" else torch.no_grad():
        handle = PLACES[where](model, sim, tmp_path)
        device = handle.plan.device
        assert_same(model, plain, device)
    files = [each.read_bytes() for each in tmp_path.iterdir()]
    with handle:
        for _ in range(2):
            sim.module.synchronize()
            for each in weights:
                (CHANGES | TURNED)[change](*each)
            assert_same(model, plain, device)
        twin = copy.deepcopy(model)
        assert_same(twin, plain, "cpu")
        twin[0].weight.zero_()
        assert_same(model, plain, device)
    assert_equal(list(model.parameters()), list(plain.parameters()))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == files


@pytest.mark.parametrize("budget", [None, LEAST])
@pytest.mark.parametrize("where", ["on the host", "on a disk", "trained"])
def test_an_average_of_weights_is_applied_and_taken_back(sim, budget, where, tmp_path):
    model = layers()
    plain, pinned = copy.deepcopy(model), []
    options = {"training": where == "trained", "host": tmp_path if "disk" in where else "pinned"}
    with page(model, sim.device, 1, budget=budget, **options) as handle:
        for _ in range(3):
            kept = {each: each.data for each in model.parameters()}
            for each in model.parameters():
                each.data = each.data * 0.5
            run(model, sim.device)
            for each, value in kept.items():
                each.data = value
            del kept
            assert_same(model, plain, sim.device)
            pinned.append(handle._engine.pinned_bytes)
        assert len(set(pinned)) == 1


def to_a_part(a, b):
    b.data = torch.zeros(WIDTH + 1, WIDTH)[1:]
    a.data = torch.as_strided(b.data, (WIDTH, WIDTH), (WIDTH, 1), 0)


@pytest.mark.parametrize("tie", [lambda a, b: setattr(a, "data", b.data), to_a_part])
def test_a_tie_that_comes_while_it_is_paged_is_refused(sim, tie):
    model = layers()
    a, b = (model[i].weight for i in (1, 0))
    with page(model, sim.device, 1):
        tie(a, b)
        with pytest.raises(PagingError, match=r"^'[01]\.weight' was given the memory of '[01]\."):
            run(model, sim.device)
        a.data = torch.zeros(WIDTH, WIDTH)
        run(model, sim.device)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda optimizer, weight: setattr(weight, "data", weight.data * 2), "1.weight"),
        (lambda optimizer, weight: optimizer.step(), "3.weight"),
    ],
)
@pytest.mark.parametrize("budget", [None, LEAST])
def test_a_change_between_a_forward_and_its_backward_pass_raises_if_not_given_back(
    sim, budget, change, name
):
    model, x = layers(), torch.ones(2, WIDTH, device=sim.device)
    optimizer, weight = torch.optim.SGD(model.parameters(), 0.1), model[1].weight
    with page(model, sim.device, 1, budget=budget, training=True):
        model(x).sum().backward()
        loss = model(x).sum()
        change(optimizer, weight)
        with pytest.raises(RuntimeError, match=rf"^one of the variables .* '{name}' is at vers"):
            loss.backward()
        model.zero_grad()
        plain = copy.deepcopy(model).to(sim.device)
        for each in (model, plain):
            loss, kept = each(x).sum(), each[1].weight.data
            each[1].weight.data = kept * 2
            each[1].weight.data = kept
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.equal(theirs.grad.cpu())
