"""Checkpoints that name or form tensors otherwise than the model does: mapped, or refused."""

import copy
import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tenure.paging import PagingError, load_paged

from ..support import assert_equal, open_files
from ..transformers_models import build

pytestmark = pytest.mark.usefixtures("without_gradients")

MIXTRAL = "MixtralForCausalLM"


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", MIXTRAL, "ViTModel"])
def test_what_transformers_saves_is_what_its_model_gets(name, tmp_path):
    expected, joins = build(name).state_dict(), name == MIXTRAL
    shard_size = "20KB" if joins else "10GB"
    build(name).save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    model, host = build(name, 1), tmp_path / "own"
    before = list(map(id, model.parameters()))
    with load_paged(model, tmp_path / "saved", "cpu", host=host if joins else None):
        assert_equal(model.state_dict(), expected)
        assert list(map(id, model.parameters())) == before
    assert_equal(model.state_dict(), expected)
    assert not host.exists() or list(host.iterdir()) == []  # the file has no name


def refused(folder, told, host):
    """That the folder is, with all as it was and no file left open."""
    model = build(MIXTRAL, 1)
    gc.collect()
    before, n_files = copy.deepcopy(model.state_dict()), open_files()
    with pytest.raises(PagingError, match=told):
        load_paged(model, folder, "cpu", host=host)
    assert_equal(model.state_dict(), before)
    gc.collect()  # the traceback of an error leads to what it failed with
    assert open_files() == n_files


def test_no_folder_a_full_disk_and_experts_that_do_not_fit_together_are_said(tmp_path, monkeypatch):
    def full(file, tensor):
        raise OSError(28, "No space left on device")

    build(MIXTRAL).save_pretrained(tmp_path)
    told = (
        r"^model.safetensors holds 4 of the tensors of MixtralForCausalLM in another form, such as "
        r"'model\.layers.* and 7 more: 192\.0 KiB have to be written once .* Nothing was loaded\. "
        r"Name a folder on a disk for them, host=Path\(\.\.\.\)"
    )
    refused(tmp_path, told, host=None)
    with monkeypatch.context() as patch:
        patch.setattr("tenure.paging._checkpoint._append", full)
        refused(tmp_path, r"^192.0 KiB of MixtralForCausalLM could not be written", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = torch.ones(3, 3)
    save_file(tensors, path)
    told = (
        r"^model.safetensors holds 'model.layers.0.mlp.experts.gate_up_proj' as .* and they "
        r"could not be converted: .* Nothing was loaded"
    )
    refused(tmp_path, told, tmp_path)
    with pytest.raises(PagingError, match=r"the weights stay in their own files. Name a folder"):
        load_paged(nn.Linear(2, 2), tmp_path, "cpu", host="pinned")
