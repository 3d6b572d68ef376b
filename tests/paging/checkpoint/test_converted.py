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
    GptOssConfig,
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
    "GptOssForCausalLM": lambda: GptOssConfig(
        **_TEXT, **_LAYERS, **_HEADS, head_dim=8, num_local_experts=4
    ),
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
    build().save_pretrained(tmp_path)
    model = build(seed=1)
    before = values_of(model)
    with pytest.raises(PagingError) as caught:
        load_paged(model, tmp_path, "cpu")
    assert str(caught.value) == (
        "model.safetensors holds 4 of the tensors of MixtralForCausalLM in another form, such as "
        "'model.layers.0.mlp.experts.gate_up_proj' as "
        "'model.layers.0.block_sparse_moe.experts.0.w1.weight' and 7 more: 192.0 KiB have to be "
        "written once in the model's own form. Nothing was loaded. Name a folder on a disk for "
        "them, host=Path(...); their file has no name there, and goes with the model."
    )
    assert_same(model.state_dict(), before)


def open_files():
    gc.collect()  # the traceback of an error leads to what it failed with
    return len(os.listdir("/proc/self/fd"))


def test_experts_that_do_not_fit_together_are_refused_and_no_file_stays_open(tmp_path):
    build().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = torch.ones(3, 3)
    save_file(tensors, path)
    model, n_files = build(seed=1), open_files()
    before = values_of(model)
    with pytest.raises(
        PagingError,
        match=r"^model.safetensors holds 'model.layers.0.mlp.experts.gate_up_proj' as .* and they "
        r"could not be converted: .* Nothing was loaded",
    ):
        load_paged(model, tmp_path, "cpu", host=tmp_path)
    assert_same(model.state_dict(), before)
    assert open_files() == n_files


def test_a_folder_that_is_full_is_said_and_the_model_is_as_before(tmp_path, monkeypatch):
    def full(file, tensor):
        raise OSError(28, "No space left on device")

    build().save_pretrained(tmp_path)
    model, n_files = build(seed=1), open_files()
    before = values_of(model)
    monkeypatch.setattr("tenure.paging._checkpoint._append", full)
    with pytest.raises(PagingError, match=r"^192.0 KiB of MixtralForCausalLM could not be written"):
        load_paged(model, tmp_path, "cpu", host=tmp_path)
    assert_same(model.state_dict(), before)
    assert open_files() == n_files


def test_a_host_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(PagingError, match=r"the weights stay in their own files. Name a folder"):
        load_paged(nn.Linear(2, 2), tmp_path, "cpu", host="pinned")


class Renaming(nn.Module):
    """As a model of transformers before 5."""

    _checkpoint_conversion_mapping = {"^old": "layers", "^layers": "never"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))


def test_a_map_of_patterns_is_followed(tmp_path):
    source = Renaming()
    names = {"old.0.weight": source.layers[0].weight, "old.0.bias": source.layers[0].bias}
    save_file({name: each.detach() for name, each in names.items()}, tmp_path / "model.safetensors")
    model = Renaming()
    with load_paged(model, tmp_path, "cpu"):
        assert_same(model.state_dict(), source.state_dict())
