"""Checkpoints that name or form tensors otherwise than the model does: mapped, or refused."""

import gc
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers.core_model_loading", reason="transformers 4 converts nothing")
from transformers import (
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    ViTConfig,
)

from tenure.paging import PagingError, load_paged

pytestmark = pytest.mark.usefixtures("without_gradients")

_TEXT = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_HEADS = {"num_key_value_heads": 2}
_IMAGES = {"image_size": 16, "patch_size": 8}


MODELS = {
    "LlavaForConditionalGeneration": lambda: LlavaConfig(
        text_config=LlamaConfig(**_TEXT, **_LAYERS, **_HEADS),
        vision_config={"model_type": "clip_vision_model", **_LAYERS, **_IMAGES},
        image_token_index=59,
    ),
    "MixtralForCausalLM": lambda: MixtralConfig(**_TEXT, **_LAYERS, **_HEADS, num_local_experts=4),
    "ViTModel": lambda: ViTConfig(**_LAYERS, **_IMAGES),
}


def build(name="MixtralForCausalLM", seed=0):
    torch.manual_seed(seed)
    return getattr(transformers, name)(MODELS[name]()).eval()


def values_of(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(state[name], each), name


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_is_what_its_model_gets(name, tmp_path):
    expected, joins = values_of(build(name)), name == "MixtralForCausalLM"
    shard_size = "20KB" if joins else "10GB"
    build(name).save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    model, host = build(name, 1), tmp_path / "own"
    before = list(map(id, model.parameters()))
    with load_paged(model, tmp_path / "saved", "cpu", host=host if joins else None):
        assert_same(model.state_dict(), expected)
        assert list(map(id, model.parameters())) == before
    assert_same(model.state_dict(), expected)
    assert not host.exists() or list(host.iterdir()) == []  # the file has no name


def test_joined_weights_need_a_folder_and_the_error_says_how_much(tmp_path):
    told = (
        r"^model.safetensors holds 4 of the tensors of MixtralForCausalLM in another form, such as "
        r"'model\.layers.* and 7 more: 192\.0 KiB have to be written once .* Nothing was loaded\. "
        r"Name a folder on a disk for them, host=Path\(\.\.\.\)"
    )
    build().save_pretrained(tmp_path)
    refused(tmp_path, told, host=None)


def refused(folder, told, host):
    """That the folder is, with all as it was and no file left open."""
    model = build(seed=1)
    gc.collect()
    before, n_files = values_of(model), len(os.listdir("/proc/self/fd"))
    with pytest.raises(PagingError, match=told):
        load_paged(model, folder, "cpu", host=host)
    assert_same(model.state_dict(), before)
    gc.collect()  # the traceback of an error leads to what it failed with
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_experts_that_do_not_fit_together_and_a_full_disk_are_said(tmp_path, monkeypatch):
    def full(file, tensor):
        raise OSError(28, "No space left on device")

    build().save_pretrained(tmp_path)
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
