"""The host's side: the model's bytes are there once, each tensor with a storage of its own."""

import gc

import torch

from tenure.paging import page

from ..models import build, mlp


def test_values_and_strides_survive_in_storages_of_their_own_and_the_old_memory_is_let_go(sim):
    model, _, _ = build("strided")
    values = [(p.clone(), p.stride()) for p in model.parameters()]
    old = [p.untyped_storage()._weak_ref() for p in model.parameters()]
    gc.collect()
    gc.disable()  # nothing waits for a collection
    try:
        handle = page(model, sim.device, budget="20KiB")
        assert all(map(torch.UntypedStorage._expired, old))
    finally:
        gc.enable()
    for parameter, (value, stride) in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.data_ptr() % 256 == 0
        assert parameter.is_pinned()
    handle.unpage()
    assert not any(p.is_pinned() for p in model.parameters())


def test_writes_are_seen_in_a_model_that_was_paged_in_inference_mode(sim):
    model, x = mlp().eval(), torch.ones(1, 32)
    weights = list(model.parameters())  # whoever kept these asks the pager for nothing
    with torch.inference_mode():
        handle = page(model, sim.device, budget="1MiB")
        before = model(x).cpu()
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2)
        found = model(x).cpu()
        handle.unpage()
        assert torch.equal(found, model(x))
    assert not torch.equal(found, before)
