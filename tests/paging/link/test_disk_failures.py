"""A file that can't be read any more: a clear error where it is used, and a model that lives on."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from tenure.paging import PagingError, load_paged

from ..models import WIDTH, mlp
from ..support import assert_equal, on_meta, saved

pytestmark = pytest.mark.usefixtures("without_gradients")

X = torch.ones(4, WIDTH)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.safetensors"


def failing_reads(monkeypatch):
    """Lets the disk fail from now on, until the returned function is called."""
    whole = os.preadv

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    return lambda: monkeypatch.setattr(os, "preadv", whole)


def test_a_disk_that_fails_while_residents_are_read_leaves_the_model_as_it_was(path, monkeypatch):
    saved(mlp(), path)
    failing_reads(monkeypatch)
    model = on_meta(mlp)
    message = (
        "m.safetensors can't be read at byte .*: Input/output error. No weights of it were used"
    )
    with pytest.raises(PagingError, match=message):
        load_paged(model, path, "cpu", keep=("0",))
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("budget", "prefetch"), [("8KiB", 0), ("12KiB", "auto")])
def test_a_disk_that_fails_under_a_pass_or_ahead_of_it_says_so_and_the_next_pass_is_right(
    path, monkeypatch, budget, prefetch
):
    model = mlp()
    expected, path = model(X), saved(model, path)
    with load_paged(model, path, "cpu", budget=budget, prefetch=prefetch) as handle:
        for _ in range(2):
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


def written_in_place_with_its_old_time(path):
    before = path.stat()
    data = saved(mlp(), path.with_name("other.safetensors")).read_bytes()
    with path.open("r+b") as file:
        file.write(data)
    put_back(path, before)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "change",
    [
        written_in_place_with_its_old_time,
        lambda path: os.truncate(path, 200),
        lambda path: os.utime(path, ns=(0, 1)),
    ],
)
def test_a_file_that_is_changed_while_paged_is_told_each_time_and_keeps_no_model(path, change):
    model = on_meta(mlp)
    load_paged(model, saved(mlp(), path), "cpu", budget="8KiB", prefetch=0)
    change(path)
    told = r"m.safetensors was changed while a model is paged from it.*Load the model anew"
    for _ in range(2):
        with pytest.raises(PagingError, match=told):
            model(X)
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None


def replaced(path):
    other = path.with_name("other")
    saved(mlp(), other)
    put_back(other, path.stat())
    other.replace(path)


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o400), Path.unlink, replaced])
def test_a_file_that_gets_another_name_or_permission_is_used_on(path, change):
    whole, model = mlp(), on_meta(mlp)
    with load_paged(model, saved(whole, path), "cpu", budget="8KiB", prefetch=0):
        change(path)
        assert_equal(model(X), whole(X))
        assert_equal(model(X), whole(X))
