"""The devices beside the one that is current."""

import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, batch, step
from tenure.paging import page

from .rig import OOM_TEXT, check


@check()
def random_numbers_of_each_device(rig):
    """A retry draws the same numbers on every device."""
    rig.needs_two_devices()

    def run(largest):
        @batch(initial_batchsize=4, restore_rng=True, cache_type=NoBatchsizeCache)
        def draw(size):
            drawn = [torch.rand(8, device=rig.at(index)).cpu() for index in range(2)]
            if size > largest:
                raise torch.OutOfMemoryError(OOM_TEXT)
            return drawn

        torch.manual_seed(0)
        return draw()

    for current in range(2):
        with rig.module.device(current):
            pairs = zip(run(4), run(1), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), current
    return {"devices": 2}


@check()
def dropout_on_another_device(rig):
    """A retried step draws the dropout of another device again."""
    rig.needs_two_devices()
    model = nn.Linear(8, 8).double().to(rig.at(0))
    x = torch.randn(16, 8, dtype=torch.float64)

    def gradient(maximum):
        sizes = []

        def loss(x):
            sizes.append(len(x))
            hidden = nn.functional.dropout(model(x.to(rig.at(0))).to(rig.at(1)))
            if len(x) > 4:
                raise torch.OutOfMemoryError(OOM_TEXT)
            return hidden.square().mean()

        model.zero_grad()
        torch.manual_seed(0)
        result = step(loss, x, maximum=maximum, verify=False, cache_type=NoBatchsizeCache)
        return model.weight.grad.cpu(), result.sizes, sizes

    plain, sizes, _ = gradient(4)
    retried, again, tried = gradient(16)
    assert sizes == again == (4, 4, 4, 4)
    assert tried[0] == 16
    assert torch.equal(plain, retried)
    return {"tried": tried}


@check()
def pinning_for_another_device(rig):
    """Paging to the second device while the first is current makes a context on no other."""
    rig.needs_two_devices()
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).eval()
    x, second = torch.randn(2, 64), rig.at(1)
    with torch.inference_mode():
        whole = model(x)
        with page(model, second, budget="50KiB"):
            paged = model(x.to(second)).cpu()
    if rig.sim is None:
        contexts = [index for index in range(2) if torch._C._cuda_hasPrimaryContext(index)]
    else:
        contexts = sorted(rig.sim.contexts)
    torch.testing.assert_close(paged, whole)
    assert contexts == [1], contexts
    return {"contexts": contexts}
