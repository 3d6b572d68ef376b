"""The host's side: the model's bytes are there once, each tensor with a storage of its own."""

import gc
import mmap

import pytest
import torch

from tenure.paging import page

from ..models import build, mlp


def test_each_tensor_has_a_storage_of_its_own_size(sim):
    model = mlp().eval()
    with page(model, sim.device):
        for parameter in model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        addresses = [p.data_ptr() for p in model.parameters()]
        assert all(address % 256 == 0 for address in addresses)
        assert all(p.is_pinned() for p in model.parameters())
    assert not any(p.is_pinned() for p in model.parameters())


def test_values_and_strides_survive_and_the_old_memory_is_let_go(sim):
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
    handle.unpage()


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


def test_host_memory_that_runs_out_leaves_the_model_as_it_was(sim, monkeypatch):
    plain, made = mmap.mmap, []

    def fail_at_the_third(*args, **options):
        made.append(args)
        if len(made) == 3:
            raise MemoryError("no more")
        return plain(*args, **options)

    monkeypatch.setattr(mmap, "mmap", fail_at_the_third)
    model, x = mlp().eval(), torch.ones(1, 32)
    expected = model(x)
    with pytest.raises(MemoryError, match=r"^no more$"):
        page(model, sim.device, budget="10KiB")
    gc.collect()
    assert sim.allocated_bytes == 0
    assert torch.equal(model(x), expected)
    assert not any(p.is_pinned() for p in model.parameters())
