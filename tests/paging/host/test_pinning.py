"""Host memory of a paged model, and what is told if it can't be pinned or unpinned."""

import gc

import pytest
import torch

from tenure.paging import PagingWarning, page
from tests.threads import on_thread

from ..models import build, mlp
from ..support import assert_equal, whole_output

pytestmark = pytest.mark.usefixtures("without_gradients")


def use(sim):
    """Do what would raise an error that was left behind."""
    torch.ones(1, device=sim.device).add_(1)


def leave_an_error_behind(sim):
    assert sim.module.cudart().cudaHostUnregister(8) != 0


@pytest.mark.parametrize(("name", "which"), [("mlp", "all"), ("tied", 4), ("mlp", "10KiB")])
def test_what_can_not_be_pinned_is_told_once_and_the_values_are_the_same(sim, name, which):
    model, args, kwargs = build(name)
    expected = whole_output(sim.device, model, *args, **kwargs)
    sim(fail_pinning=which)
    with pytest.warns(PagingWarning, match=r"could not be pinned .the driver says 2.") as caught:
        handle = page(model, sim.device, budget="24KiB")
    assert [each.filename for each in caught] == [__file__]
    use(sim)
    with handle:
        for _ in range(3):
            assert torch.equal(model(*args, **kwargs).cpu(), expected)
        report = handle.report()
    use(sim)
    pageable_bytes = report.host_bytes - report.pinned_bytes
    assert 0 < pageable_bytes <= report.host_bytes
    assert (report.pinned_bytes == 0) is (which == "all")
    assert "KiB not pinned\n" in str(report) + "\n"


@pytest.mark.parametrize("end", ["unpaged", "garbage"])
def test_a_buffer_that_can_not_be_unpinned_is_told_and_leaves_no_error_behind(sim, caplog, end):
    def run():
        model = mlp().eval()
        handle = page(model, sim.device)
        assert sim.module.cudart().cudaHostUnregister(model[0].weight.data_ptr()) == 0
        if end == "unpaged":
            handle.unpage()
        del model, handle
        gc.collect()
        use(sim)

    on_thread(run)
    told = "could not be unpinned on sim:0 (the driver says 713)"
    assert sum(told in each for each in caplog.messages) == 1


def test_an_error_that_the_user_left_behind_is_raised_and_the_model_is_as_it_was(sim, model, x):
    expected = model(x)
    sim(fail_pinning="all")
    leave_an_error_behind(sim)
    with pytest.raises(torch.AcceleratorError, match="registered memory region") as caught:
        page(model, sim.device)
    assert "was there before paging did anything" in caught.value.__notes__[0]
    assert sim.allocated_bytes == 0
    assert torch.equal(model(x), expected)
    sim.fail_pinning(None)
    handle = page(model, sim.device)
    leave_an_error_behind(sim)
    handle.unpage()
    with pytest.raises(torch.AcceleratorError, match="registered memory region"):
        use(sim)


def test_values_and_strides_survive_in_storages_of_their_own_and_the_old_memory_is_let_go(
    sim, uncollected
):
    model, _, _ = build("strided")
    values = [p.clone() for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    old = [p.untyped_storage()._weak_ref() for p in model.parameters()]
    handle = page(model, sim.device, budget="20KiB")
    assert all(map(torch.UntypedStorage._expired, old))
    assert_equal(list(model.parameters()), [torch.nn.Parameter(value) for value in values])
    assert [p.stride() for p in model.parameters()] == strides
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.data_ptr() % 256 == 0
        assert parameter.is_pinned()
    handle.unpage()
    assert not any(p.is_pinned() for p in model.parameters())


@pytest.mark.parametrize("name", ["cudaHostRegister", "cudaHostUnregister"])
def test_a_runtime_that_pins_nothing_in_place_leaves_it_to_the_allocator(
    sim, model, x, monkeypatch, name
):
    monkeypatch.delattr(type(sim.module.cudart()), name)
    expected = whole_output(sim.device, model, x)
    with page(model, sim.device, budget="12KiB") as handle:
        assert torch.equal(model(x).cpu(), expected)
        report = handle.report()
        assert report.pinned_bytes == report.host_bytes
        assert all(p.is_pinned() for p in model.parameters())
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
