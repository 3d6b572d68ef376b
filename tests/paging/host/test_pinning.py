"""Host memory that can't be pinned or unpinned: it is told, and no error is left behind."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tenure.paging import PagingWarning, chunk, page

from ..models import build, mlp

pytestmark = pytest.mark.usefixtures("without_gradients")


def use(sim):
    """Do what would raise an error that was left behind."""
    torch.ones(1, device=sim.device).add_(1)


def leave_an_error_behind(sim):
    assert sim.module.cudart().cudaHostUnregister(8) != 0


@pytest.mark.parametrize("which", ["all", 1, 4, "10KiB"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_what_can_not_be_pinned_is_told_once_and_the_values_are_the_same(sim, name, which):
    model, args, kwargs = build(name)
    expected = copy.deepcopy(model).to(sim.device)(*(x.to(sim.device) for x in args)).cpu()
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
    assert (report.pinned_bytes == 0) is (which in ("all", 1))
    assert "KiB not pinned\n" in str(report) + "\n"


def test_a_report_says_that_all_is_pinned_or_nothing(sim, model, x):
    for host, is_pinned in (("pinned", True), ("pageable", False)):
        with page(model, sim.device, host=host) as handle:
            model(x)
            report = handle.report()
        assert report.pinned_bytes == report.host_bytes * is_pinned
        assert ("not pinned" in str(report)) is not is_pinned


def test_staging_memory_that_can_not_be_pinned_leaves_no_error_behind(sim, tmp_path, model, x):
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device)).cpu()
    sim(fail_pinning=2)
    with pytest.warns(PagingWarning, match="the driver says 2"):
        handle = page(model, sim.device, budget="12KiB", host=tmp_path)
    use(sim)
    with handle:
        assert torch.equal(model(x).cpu(), expected)
        report = handle.report()
        assert report.pinned_bytes == report.staging_bytes // 4


def test_a_chunk_that_can_not_be_pinned_leaves_no_error_behind(sim, model, x):
    sim(fail_pinning="all")
    expected = model(x)
    with pytest.warns(PagingWarning, match="could not be pinned"):
        handle = chunk(model, sim.device, "10KiB")
    with handle:
        torch.testing.assert_close(model(x).cpu(), expected)


def unregister_one(sim, model):
    assert sim.module.cudart().cudaHostUnregister(model[0].weight.data_ptr()) == 0


def by_unpaging(make):
    handle = make()
    handle.unpage()


def by_the_end_of_the_block(make):
    with make():
        pass


def by_garbage(make):
    make()
    gc.collect()


@pytest.mark.parametrize("end", [by_unpaging, by_the_end_of_the_block, by_garbage])
@pytest.mark.parametrize("on_a_thread", [False, True])
def test_a_buffer_that_can_not_be_unpinned_is_told_and_leaves_no_error_behind(
    sim, caplog, end, on_a_thread
):
    def make():
        model = mlp().eval()
        handle = page(model, sim.device)
        unregister_one(sim, model)
        return handle

    def run():
        end(make)
        use(sim)

    run_on_a_thread(run) if on_a_thread else run()
    told = [
        each
        for each in caplog.messages
        if "could not be unpinned on sim:0 (the driver says 713)" in each
    ]
    assert len(told) == 1


def run_on_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_staging_memory_that_can_not_be_unpinned_leaves_no_error_behind(
    sim, tmp_path, model, caplog
):
    handle = page(model, sim.device, budget="12KiB", host=tmp_path)
    slot = handle._engine._link._staging[0]
    assert sim.module.cudart().cudaHostUnregister(slot.data_ptr()) == 0
    handle.unpage()
    use(sim)
    assert "could not be unpinned" in caplog.text


def test_an_error_that_the_user_left_behind_is_raised_and_the_model_is_as_it_was(sim, model, x):
    expected = model(x)
    sim(fail_pinning="all")
    leave_an_error_behind(sim)
    with pytest.raises(torch.AcceleratorError, match="registered memory region") as caught:
        page(model, sim.device)
    assert "was there before paging did anything" in caught.value.__notes__[0]
    assert sim.allocated_bytes == 0
    assert torch.equal(model(x), expected)


def test_an_error_that_the_user_left_behind_outlives_unpaging(sim, model):
    handle = page(model, sim.device)
    leave_an_error_behind(sim)
    handle.unpage()
    with pytest.raises(torch.AcceleratorError, match="registered memory region"):
        use(sim)


@pytest.mark.parametrize("name", ["cudaHostRegister", "cudaHostUnregister"])
def test_a_runtime_that_pins_nothing_in_place_leaves_it_to_the_allocator(
    sim, model, x, monkeypatch, name
):
    monkeypatch.delattr(type(sim.module.cudart()), name)
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device)).cpu()
    with page(model, sim.device, budget="12KiB") as handle:
        assert torch.equal(model(x).cpu(), expected)
        report = handle.report()
        assert report.pinned_bytes == report.host_bytes
        assert all(p.is_pinned() for p in model.parameters())
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_memory_of_the_allocator_is_let_go_with_the_last_tensor_in_it(sim, monkeypatch):
    monkeypatch.delattr(sim.module, "cudart")
    sim.fail_pinning("40KiB")  # room for one model, and not for two
    model = mlp().eval()
    page(model, sim.device).unpage()
    weight, bias = model[0].weight, model[0].bias.detach()
    assert weight.is_pinned()
    del model, weight
    gc.collect()
    assert bias.is_pinned()
    page(mlp().eval(), sim.device).unpage()


def test_memory_of_the_allocator_is_pinned_with_the_second_device_as_the_current_one(
    sim, model, x, monkeypatch
):
    sim(devices=2)
    monkeypatch.delattr(sim.module, "cudart")
    seen, pin_memory = [], torch.Tensor.pin_memory

    def noted(tensor):
        seen.append((sim.module.current_device(), tensor.nbytes))
        return pin_memory(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", noted)
    with page(model, "sim:1") as handle:
        model(x)
        report = handle.report()
        assert {index for index, _ in seen} == {1}
        assert sum(n_bytes for _, n_bytes in seen) == report.pinned_bytes == report.host_bytes
    assert sim.module.current_device() == 0


def test_of_an_allocator_that_can_not_pin_the_first_line_is_told_once(sim, model, x, monkeypatch):
    monkeypatch.delattr(sim.module, "cudart")
    asked = []

    def refuse(tensor):
        asked.append(tensor)
        raise RuntimeError("UR_RESULT_ERROR_OUT_OF_HOST_MEMORY\nmore")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    first = r"^\d\.\d KiB of .* pinned .UR_RESULT_ERROR_OUT_OF_HOST_MEMORY., nor "
    with pytest.warns(PagingWarning, match=first) as caught:
        handle = page(model, sim.device)
    assert (len(asked), len(caught)) == (1, 1)
    with handle:
        model(x)
        assert handle.report().pinned_bytes == 0


def test_an_allocator_that_can_not_pin_is_told_once(sim, model, x, monkeypatch):
    monkeypatch.delattr(sim.module, "cudart")
    expected = copy.deepcopy(model).to(sim.device)(x.to(sim.device)).cpu()
    sim(fail_pinning=2)
    with pytest.warns(PagingWarning, match=r"could not be pinned .CUDA error: out of") as caught:
        handle = page(model, sim.device, budget="12KiB")
    assert len(caught) == 1
    with handle:
        assert torch.equal(model(x).cpu(), expected)
