"""The devices beside the one that is current."""

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, batch, step
from tenure.paging import page


@pytest.mark.parametrize("current", [0, 1])
def test_a_retry_draws_the_same_numbers_on_every_device(rig, tell, current):
    rig.needs_two()

    def run(largest):
        @batch(initial_batchsize=4, restore_rng=True, cache_type=NoBatchsizeCache)
        def draw(size):
            drawn = [torch.rand(8, device=rig.at(index)).cpu() for index in range(2)]
            if size > largest:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return drawn

        torch.manual_seed(0)
        return draw()

    with rig.module.device(current):
        plain, retried = run(4), run(1)
    tell(f"current {current}: {plain[0][0]:.4f} and {plain[1][0]:.4f} drawn again")
    assert all(torch.equal(*pair) for pair in zip(plain, retried, strict=True))


def test_a_retried_step_draws_the_dropout_of_another_device_again(rig, tell):
    rig.needs_two()
    model = nn.Linear(8, 8).double().to(rig.at(0))
    x = torch.randn(16, 8, dtype=torch.float64)

    def gradient(maximum):
        sizes = []

        def loss(x):
            sizes.append(len(x))
            hidden = nn.functional.dropout(model(x.to(rig.at(0))).to(rig.at(1)))
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return hidden.square().mean()

        model.zero_grad()
        torch.manual_seed(0)
        result = step(loss, x, maximum=maximum, verify=False, cache_type=NoBatchsizeCache)
        return model.weight.grad.cpu(), result.sizes, sizes

    plain, sizes, _ = gradient(4)
    retried, again, tried = gradient(16)
    tell(f"tried {tried}; gradients {plain.norm():.6f} and {retried.norm():.6f}")
    assert sizes == again == (4, 4, 4, 4)
    assert tried[0] == 16
    assert torch.equal(plain, retried)


def test_pinning_makes_no_context_on_another_device(rig, tell):
    rig.needs_two()
    found = rig.run("pin_for_the_second")
    tell(f"contexts on {found}")
    assert found == [1]


def test_a_model_is_paged_on_the_second_device_while_the_first_is_current(rig, tell):
    rig.needs_two()
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).eval()
    x = torch.randn(2, 64)
    with torch.inference_mode():
        whole = model(x)
        with page(model, rig.at(1), budget="50KiB"):
            paged = model(x.to(rig.at(1)))
    tell(f"output on {paged.device}")
    torch.testing.assert_close(paged.cpu(), whole)
