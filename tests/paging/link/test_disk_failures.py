"""A file that can't be read any more: a clear error where it is used, and a model that lives on."""

import copy
import gc
import os
import re
import weakref

import pytest
import torch

from tenure.paging import PagingError, load_paged

from ..models import WIDTH, mlp
from ..test_zoo import assert_equal
from .test_disk_zoo import saved

X = torch.ones(4, WIDTH)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.safetensors"


def on_meta(make=mlp):
    with torch.device("meta"):
        return make()


def refused(path, message, **options):
    """That a model on meta is refused, before anything runs, and stays what it is."""
    model = on_meta()
    with pytest.raises(PagingError, match=message) as caught:
        load_paged(model, path, "cpu", **options)
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return caught.value


def failing_reads(monkeypatch):
    """Lets the disk fail from now on, until the returned function is called."""
    whole = os.preadv

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    return lambda: monkeypatch.setattr(os, "preadv", whole)


def test_a_cut_file_is_refused_before_the_first_forward(path):
    saved(mlp(), path)
    os.truncate(path, path.stat().st_size - 4)
    refused(path, "m.safetensors is no whole safetensors file")


def test_a_file_of_another_model_is_refused_before_the_first_forward(path):
    saved(mlp().half(), path)
    refused(
        path, r"'0.weight' is float16\[32, 32\] in the file, and float32\[32, 32\] in the model"
    )


def test_a_budget_that_is_too_small_is_refused_and_the_model_stays_on_meta(path):
    saved(mlp(), path)
    error = refused(path, "Sequential can't be paged within 1.0 KiB", budget="1KiB")
    load_paged(on_meta(), path, "cpu", budget=error.minimum_bytes).unpage()


def test_a_kept_module_that_is_none_is_refused_and_the_model_stays_on_meta(path):
    saved(mlp(), path)
    refused(path, "keep= names 'nobody'", keep=("nobody",))


def test_a_model_that_is_paged_already_is_refused(path):
    model = mlp()
    saved(model, path)
    with load_paged(model, path, "cpu"), pytest.raises(PagingError, match="is paged already"):
        load_paged(model, path, "cpu")


def test_a_disk_that_fails_while_residents_are_read_leaves_the_model_as_it_was(path, monkeypatch):
    saved(mlp(), path)
    failing_reads(monkeypatch)
    message = (
        "m.safetensors can't be read at byte .*: Input/output error. No weights of it were used"
    )
    refused(path, message, keep=("0",))


@torch.no_grad()
def test_a_disk_that_fails_under_a_pass_says_so_and_the_next_pass_is_right(path, monkeypatch):
    model = mlp()
    expected = model(X)
    with load_paged(model, saved(model, path), "cpu", budget="8KiB", prefetch=0):
        recover = failing_reads(monkeypatch)
        for _ in range(2):
            with pytest.raises(PagingError, match="Input/output error"):
                model(X)
        recover()
        for _ in range(2):
            assert_equal(model(X), expected)


@torch.no_grad()
def test_a_disk_that_fails_ahead_of_use_says_so_when_the_unit_is_used(path, monkeypatch):
    model = mlp()
    expected = model(X)
    with load_paged(model, saved(model, path), "cpu", budget="12KiB") as handle:
        model(X)
        model(X)
        link = handle._pager.engine._link
        link.finish()
        recover = failing_reads(monkeypatch)
        with pytest.raises(PagingError, match="Input/output error"):
            model(X)
        link.finish()
        assert handle.report().passes == 3
        recover()
        for _ in range(3):
            assert_equal(model(X), expected)


def put_back(path, before):
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@torch.no_grad()
def test_a_file_that_is_written_in_place_with_its_old_time_is_told(path):
    model = on_meta()
    load_paged(model, saved(mlp(), path), "cpu", budget="8KiB", prefetch=0)
    before = path.stat()
    data = saved(mlp(), path.with_name("other.safetensors")).read_bytes()
    with path.open("r+b") as file:
        file.write(data)
    put_back(path, before)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(PagingError, match=r"m.safetensors was changed while a model is paged"):
        model(X)


def replaced(path):
    other = path.with_name("other")
    saved(mlp(), other)
    put_back(other, path.stat())
    other.replace(path)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: path.chmod(0o400),
        lambda path: path.with_name("link").hardlink_to(path),
        lambda path: path.unlink(),
        replaced,
    ],
)
def test_a_file_that_gets_another_name_or_permission_is_used_on(path, change):
    torch.manual_seed(0)
    whole, model = mlp(), on_meta()
    with load_paged(model, saved(whole, path), "cpu", budget="8KiB", prefetch=0):
        change(path)
        assert_equal(model(X), whole(X))
        assert_equal(model(X), whole(X))


@torch.no_grad()
def test_a_file_that_is_cut_while_paged_is_told_and_does_not_end_the_process(path):
    model = on_meta()
    load_paged(model, saved(mlp(), path), "cpu", budget="8KiB", prefetch=0)
    os.truncate(path, 200)
    with pytest.raises(
        PagingError, match=r"m.safetensors was changed while a model is paged from it"
    ):
        model(X)


@torch.no_grad()
def test_a_file_that_is_written_while_paged_is_told(path):
    model = on_meta()
    load_paged(model, saved(mlp(), path), "cpu", budget="8KiB", prefetch=0)
    os.utime(path, ns=(0, 1))
    with pytest.raises(PagingError, match=re.escape("Load the model anew")):
        model(X)


@torch.no_grad()
def test_a_model_whose_file_could_not_be_read_goes_when_it_is_dropped(path):
    model = on_meta()
    load_paged(model, saved(mlp(), path), "cpu", budget="8KiB", prefetch=0)
    os.utime(path, ns=(0, 1))
    for _ in range(2):  # it is told each time
        with pytest.raises(PagingError, match=re.escape("Load the model anew")):
            model(X)
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None


@torch.no_grad()
def test_a_file_that_is_replaced_or_deleted_while_paged_is_read_on(path):
    model = mlp()
    expected = model(X)
    load_paged(model, saved(model, path), "cpu", budget="8KiB")
    saved(mlp(), path.with_suffix(".new")).rename(path)
    assert_equal(model(X), expected)
    path.unlink()
    assert_equal(model(X), expected)


@torch.no_grad()
def test_a_read_only_file_in_a_read_only_folder_is_enough(path):
    model = mlp()
    plain, expected = copy.deepcopy(model), model(X)
    saved(model, path).chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with load_paged(model, path, "cpu", budget="8KiB"):
            assert_equal(model(X), expected)
            for each in (model[0], plain[0]):
                each.weight.zero_()
            assert_equal(model(X), plain(X))
    finally:
        path.parent.chmod(0o755)
