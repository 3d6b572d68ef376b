"""Programs that other pagers computed wrongly without a word; each is exact, or fails loudly, here.

A program compares with the model whole, and raises what it finds; where it was seen stands in its
docstring. `tests.planted_faults` has faults of our own engine with such effects.
"""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tenure.paging import PagingBudget, page
from tenure.testing import Rates

from .models import WIDTH, Beside, Side, resnet

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

N_LAYERS = 6
LAYER_BYTES = 4 * WIDTH * WIDTH + 4 * WIDTH


def layers(n=N_LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)]).eval()


def x():
    torch.manual_seed(1)
    return torch.randn(4, WIDTH)


def other(model):
    """The same architecture with other weights."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for each in found.parameters():
            each.mul_(-0.5).add_(0.1)
    return found


def whole(sim, model, *args):
    there = copy.deepcopy(model).to(sim.device)
    with torch.no_grad():
        return there(*[each.to(sim.device) for each in args]).cpu()


def check(sim, model, expected_of, n_passes=3):
    """Compare some passes with those of another model, whole."""
    expected = whole(sim, expected_of, x())
    with torch.no_grad():
        for _ in range(n_passes):
            assert torch.equal(model(x().to(sim.device)).cpu(), expected)


def small(n_layers=2):
    """Room for so many of the layers, and for none to stay."""
    return n_layers * (LAYER_BYTES + 256)


@contextmanager
def trained(sim, model, budget, **options):
    """A paged model and the same one whole, in training mode."""
    there = copy.deepcopy(model).to(sim.device).train()
    with page(model.train(), sim.device, budget=budget, training=True, **options):
        yield model, there


def check_gradients(sim, model, there, n_steps=2):
    for _ in range(n_steps):
        for each in (model, there):
            each.zero_grad()
            each(x().to(sim.device)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), there.parameters(), strict=True):
            assert mine.grad is not None
            assert torch.equal(mine.grad, theirs.grad.cpu())
        for each in (model, there):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.sub_(0.01 * parameter.grad)


# --- weights that are not those of the model


def a_folder_that_another_model_had_before(sim, folder):
    """diffusers group offloading to a disk: files that are there already are read as they are."""
    for model in (layers(), other(layers())):
        plain = copy.deepcopy(model)
        with page(model, sim.device, budget=small(), host=folder):
            check(sim, model, plain)


def a_state_dict_that_is_loaded_while_weights_stay(sim, folder):
    """accelerate: "<All keys matched successfully>", and the forward keeps the old weights."""
    for budget in ("1MiB", small()):
        model = layers()
        new = other(model)
        with page(model, sim.device, budget=budget):
            check(sim, model, layers(), 1)
            model.load_state_dict(new.state_dict())
            check(sim, model, new)


def an_adapter_fused_into_weights_that_stay(sim, folder):
    """diffusers#11791, ComfyUI#13989: the copies on the device are from before, or get it twice."""
    model = layers()
    plain, update = layers(), 0.1 * torch.randn(WIDTH, WIDTH)
    with page(model, sim.device, budget="1MiB"):
        for sign in (1, -1, 1):
            check(sim, model, plain, 1)
            for layer in (*model, *plain):
                layer.weight.data += sign * update
        check(sim, model, plain)


# --- bytes of the device that are somebody else's


def blocks_that_the_ring_does_not_divide(sim, folder):
    """vllm#54975, vllm-ascend#10932: a slot is overwritten where layers % depth is not 0."""
    for n in (4, 5, 6, 7):
        model = layers(n)
        with page(model, sim.device, budget=small(3)):
            check(sim, model, layers(n))


def a_load_stream_and_one_that_computes(sim, folder):
    """fairscale OffloadModel, ComfyUI#16337: kernels run before their weights are there."""
    sim(rates=Rates(h2d_bytes_per_s=1e6))
    model = layers()
    with page(model, sim.device, budget=small()):
        check(sim, model, layers())


def a_weight_that_is_read_on_a_stream_of_its_own(sim, folder):
    """diffusers#12673, #12721: the memory is kept for another stream than the one that reads it."""
    sim(rates=Rates(memory_bytes_per_s=1e8))
    model = nn.Sequential(*[Beside(Side(sim), joins=False) for _ in range(6)]).eval()
    with page(model, sim.device, budget="10KiB", prefetch=1), torch.no_grad():
        for _ in range(3):
            model(x().to(sim.device))


def a_model_that_gave_memory_back(sim, folder):
    """comfy-aimdo#65: what goes under pressure is unmapped before its last use is over."""
    model, other, budget = layers(), layers(), PagingBudget(2 * small(4))
    with page(model, sim.device, budget=budget):
        check(sim, model, layers(), 1)
        with page(other, sim.device, budget=budget):
            check(sim, other, layers(), 4)
            check(sim, model, layers())


# --- bytes of the host that are not there yet, or not any more


def buffers_that_a_pass_in_training_mode_counts(sim, folder):
    """accelerate#2701: running statistics of batch norm are lost."""
    torch.manual_seed(0)
    model = resnet().train()
    images = torch.randn(2, 3, 6, 6)
    there = copy.deepcopy(model).to(sim.device)
    with page(model, sim.device, budget="16KiB"), torch.no_grad():
        for _ in range(3):
            model(images.to(sim.device))
            there(images.to(sim.device))
        for (name, mine), theirs in zip(model.named_buffers(), there.buffers(), strict=True):
            assert torch.equal(mine, theirs.cpu()), name


def values_that_are_read_as_soon_as_they_are_home(sim, folder):
    """verl#6447: the host reads, or frees, what a copy has yet to write, or to read."""
    sim(rates=Rates(d2h_bytes_per_s=1e6))
    model, seen = layers(), torch.zeros(64)
    model[1].register_buffer("seen", seen)
    model[1].register_forward_hook(count)
    with page(model, sim.device, budget=small()), torch.no_grad():
        for n in (1, 2, 3):
            model(x().to(sim.device))
            assert seen.eq(n).all()
    assert model[1].seen.eq(3).all()


def count(module, args, output):
    module.seen.add_(1)


# --- gradients


def a_backward_pass_behind_a_ring(sim, folder):
    """AnimaLoraStudio#466: it reads slots that the forward has given to others since."""
    for budget in (small(), small(3)):
        with trained(sim, layers(), budget) as (model, there):
            check_gradients(sim, model, there)


def steps_that_follow_one_another(sim, folder):
    """axolotl#3512: what was fetched ahead is from before the optimizer's step."""
    sim(rates=Rates(h2d_bytes_per_s=1e6))
    for budget in (small(3), "1MiB"):
        with trained(sim, layers(), budget) as (model, there):
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, there)]
            for _ in range(3):
                for each, optimizer in zip((model, there), optimizers, strict=True):
                    optimizer.zero_grad()
                    each(x().to(sim.device)).square().sum().backward()
                    # as an evaluation does, after which the link is at work
                    each(x().to(sim.device))
                    optimizer.step()
            for mine, theirs in zip(model.parameters(), there.parameters(), strict=True):
                assert torch.equal(mine, theirs.cpu())


def gradients_that_are_read_as_soon_as_they_are_there(sim, folder):
    """verl#6447, of gradients: the optimizer reads what a copy has yet to write."""
    sim(rates=Rates(d2h_bytes_per_s=1e6))
    with trained(sim, layers(), small()) as (model, there):
        for each in (model, there):
            for factor in (1, 2):
                each(factor * x().to(sim.device)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), there.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad.cpu())


PROGRAMS = (
    a_folder_that_another_model_had_before,
    a_state_dict_that_is_loaded_while_weights_stay,
    an_adapter_fused_into_weights_that_stay,
    blocks_that_the_ring_does_not_divide,
    a_load_stream_and_one_that_computes,
    a_weight_that_is_read_on_a_stream_of_its_own,
    a_model_that_gave_memory_back,
    buffers_that_a_pass_in_training_mode_counts,
    values_that_are_read_as_soon_as_they_are_home,
    a_backward_pass_behind_a_ring,
    steps_that_follow_one_another,
    gradients_that_are_read_as_soon_as_they_are_there,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_went_wrong_elsewhere_is_right_and_no_race_is_found(sim, tmp_path, program):
    program(sim, tmp_path)
    sim.finish()
