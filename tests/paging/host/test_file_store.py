"""A folder that a model is paged from: made, left as it was, or refused, the model as before."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from tenure.paging import PagingError, page, plan_paging

from ..models import mlp
from ..support import assert_equal, open_files

X = torch.ones(4, 32)


def open_or_mapped(folder):
    """How many files in a folder this process holds open or mapped, named or not."""
    with open("/proc/self/maps") as maps:
        return sum(str(folder) in line for line in maps) + open_files(folder)


@torch.no_grad()
def test_the_folder_is_made_nothing_is_seen_in_it_and_its_file_goes_with_the_model(tmp_path):
    folder, model = tmp_path / "deep" / "down", mlp()
    expected = model(X)
    storages = [each.untyped_storage()._weak_ref() for each in model.parameters()]
    with page(model, "cpu", budget="8KiB", host=folder):
        # the memory that the model had is given back
        assert all(torch.UntypedStorage._expired(each) for each in storages)
        assert os.listdir(folder) == []
        assert open_or_mapped(folder) > 0
        assert_equal(model(X), expected)
    assert_equal(model(X), expected)
    assert os.listdir(folder) == []
    del model
    gc.collect()
    assert open_or_mapped(folder) == 0
    page(mlp(), "cpu", host=folder)
    gc.collect()
    assert open_or_mapped(folder) == 0


@torch.no_grad()
def test_models_share_a_folder_in_which_all_else_stays(tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    models = [mlp() for _ in range(3)]
    expected = [model(X) for model in models]
    handles = [page(model, "cpu", host=tmp_path) for model in models]
    for _ in range(2):
        assert_equal([model(X) for model in models], expected)
    handles[0].unpage()
    assert_equal([model(X) for model in models], expected)
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path, model = tmp_path / "file", mlp()
    path.write_text("mine")
    message = (
        r"No file can be made in host='.*file': File exists. The model is as before. Name a folder "
        "that this process may write to"
    )
    with pytest.raises(PagingError, match=message):
        page(model, "cpu", host=path)
    assert path.read_text() == "mine"


def test_a_disk_that_fills_up_while_it_is_written_leaves_the_model_in_memory(tmp_path, monkeypatch):
    model = mlp()
    before = [each.data_ptr() for each in model.parameters()]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tenure.paging._files._write", full)
    with pytest.raises(PagingError, match=r"27.0 KiB of Sequential .*: No space left on device; "):
        page(model, "cpu", host=tmp_path)
    assert [each.data_ptr() for each in model.parameters()] == before
    assert open_or_mapped(tmp_path) == 0


def test_the_host_may_be_text_that_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for host in (f"{tmp_path}/new", "./here", "there"):
        with page(mlp(), "cpu", host=host) as handle:
            assert handle.plan.device == "cpu"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "new", "there"]
    for host in ("model.safetensors", Path("model.safetensors")):
        assert plan_paging(mlp(), "cpu", host=host).device == "cpu"
    with pytest.raises(PagingError, match=r"a folder, or the path of the weights, such as host="):
        plan_paging(mlp(), "cpu", host="weights")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("pined", r"""host='pined': .*, or the path of a folder, such as host='./pined'\.$"""),
        (" ", r"""host=' ': write host="pinned", host="pageable", or the path"""),
        (None, "host=None: write"),
        (1, "host=1: write"),
    ],
)
def test_a_word_that_is_no_path_is_refused_and_no_folder_is_made(
    tmp_path, monkeypatch, host, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PagingError, match=message):
        page(mlp(), "cpu", host=host)
    assert not list(tmp_path.iterdir())
