"""Architectures of transformers: the layers of each model type, its widths cut, random weights.

A model type gets the values of ``_SMALL`` that its configuration has a word for, and what it needs
besides from ``_OWN``: combinations that its own checks ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._training_steps import Architecture, Step

_VOCABULARY = 2048
_TOKENS = 64

_CAUSAL = """
    gpt2 gpt_neo gpt_neox gptj gpt_bigcode opt bloom llama mistral mixtral qwen2 qwen3 qwen2_moe
    qwen3_moe qwen3_next gemma gemma2 gemma3_text phi phi3 falcon mpt stablelm olmo olmo2 olmoe
    cohere granite granitemoe starcoder2 codegen persimmon deepseek_v2 deepseek_v3 mamba mamba2
    falcon_mamba rwkv recurrent_gemma xglm biogpt ctrl openai-gpt nemotron glm smollm3 ernie4_5
    gpt_oss lfm2 xlstm minimax helium diffllama jamba jetmoe apertus exaone4 bitnet xlnet
"""
_MASKED = """
    bert roberta albert distilbert electra deberta deberta-v2 mpnet layoutlm big_bird longformer
    reformer funnel squeezebert mobilebert roformer nystromformer convbert fnet modernbert ibert
    rembert esm yoso megatron-bert flaubert xlm data2vec-text xmod tapas eurobert nomic_bert
"""
_SEQUENCE_TO_SEQUENCE = """
    t5 bart mbart pegasus marian blenderbot m2m_100 led prophetnet fsmt mt5 umt5 longt5
    switch_transformers bigbird_pegasus plbart mvp nllb-moe pegasus_x
"""
_IMAGES = """
    vit deit beit swin swinv2 convnext convnextv2 resnet regnet mobilenet_v1 mobilenet_v2 mobilevit
    mobilevitv2 efficientnet poolformer pvt pvt_v2 segformer levit cvt focalnet dinov2
    dinov2_with_registers bit data2vec-vision vit_msn ijepa hiera swiftformer hgnet_v2 textnet
    pp_lcnet siglip
"""
_SPEECH = "wav2vec2 hubert wavlm sew sew-d unispeech unispeech-sat data2vec-audio"

_HEADS: dict[str, int] = dict.fromkeys(
    [
        *("num_attention_heads", "num_heads", "encoder_attention_heads"),
        *("decoder_attention_heads", "n_head", "n_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts"),
    ],
    4,
)
_LAYERS: dict[str, int] = dict.fromkeys(
    [
        *("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"),
        *("num_decoder_layers", "n_layer", "n_layers"),
        *("num_key_value_heads", "num_experts_per_tok"),
    ],
    2,
)
_WIDTHS: dict[str, int] = dict.fromkeys(["hidden_size", "d_model", "embedding_size", "n_embd"], 256)
_WIDER: dict[str, int] = dict.fromkeys(
    [
        *("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim"),
        *("ffn_hidden_size", "moe_intermediate_size"),
    ],
    512,
)
_SMALL: dict[str, Any] = {
    **_HEADS,
    **_LAYERS,
    **_WIDTHS,
    **_WIDER,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "head_dim": 64,
    "d_kv": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}

_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 32, "qk_rope_head_dim": 32},
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 32, "qk_rope_head_dim": 32,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "mamba2": {"num_heads": 8},
    "qwen2_moe": {"shared_expert_intermediate_size": 512},
    "qwen3_next": {"shared_expert_intermediate_size": 512},
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (64, 192)},
    "xmod": {"default_language": "en_XX"},
    "funnel": {"block_sizes": [1, 1], "d_head": 64, "d_inner": 512},
    "longformer": {"attention_window": 32},
    "swin": {"image_size": 112, "embed_dim": 48, "depths": [1, 1], "num_heads": [2, 4]},
    "swinv2": {"image_size": 128, "embed_dim": 48, "window_size": 4, "depths": [1, 1],
               "num_heads": [2, 4]},
    "convnext": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1]},
    "convnextv2": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1]},
    "mobilevit": {"image_size": 128},
    "mobilevitv2": {"image_size": 128},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "poolformer": {"hidden_sizes": [32, 64, 128, 256]},
    "pvt": {"image_size": 64},
    "levit": {"image_size": 224},
    "focalnet": {"image_size": 64, "embed_dim": 48},
    "hiera": {"image_size": [64, 64], "embed_dim": 48},
    "bit": {"embedding_size": 32, "hidden_sizes": [128, 256, 512, 1024], "depths": [1, 1, 1, 1]},
    "resnet": {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [1, 1, 1, 1]},
    "regnet": {"hidden_sizes": [64, 128, 192, 512], "depths": [1, 1, 2, 1]},
}  # fmt: skip
_LISTED = "convnext convnextv2 resnet regnet bit hiera swin swinv2 levit cvt focalnet"
"""Those whose widths are lists, or follow from others."""


@cache
def _config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def small_config(model_type: str, **own: Any) -> Any:
    """The configuration of a model type with few, narrow layers."""
    made = _config_class(model_type)
    default = made()
    known = set(vars(default)) | set(default.to_dict()) | set(made.attribute_map)
    if model_type in _LISTED.split():
        known -= {*_WIDTHS, *_LAYERS, *_HEADS, *_WIDER}
    values = {
        name: value
        for name, value in _SMALL.items()
        if name in known
        if not isinstance(getattr(default, name, None), (list, tuple, dict))
    }
    config = made(**(values | _OWN.get(model_type, {}) | own))
    config.decoder_start_token_id = 0
    return config


def build_model(auto: str, model_type: str, **own: Any) -> nn.Module:
    """A model in training mode; ``auto`` is a name in transformers: an auto class or a model."""
    import transformers

    made = getattr(transformers, auto)
    config = small_config(model_type, **own)
    model: nn.Module = made.from_config(config) if auto.startswith("Auto") else made(config)
    return model.train()


def loss_of(model: nn.Module) -> Callable[[dict[str, Any]], Tensor]:
    """The model's own loss of a batch by name, or the mean square of what comes first."""

    def fn(batch: dict[str, Any]) -> Tensor:
        output = model(**batch)
        loss = getattr(output, "loss", None)
        found: Tensor = output[0].square().mean() if loss is None else loss
        return found

    return fn


def _step(model: nn.Module, batch: dict[str, Any]) -> Step:
    return Step(model, loss_of(model), (batch,))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, shape)


def _text_step(auto: str, model_type: str, batch_size: int) -> Step:
    model = build_model(auto, model_type)
    ids = _tokens(batch_size, _TOKENS)
    return _step(model, {"input_ids": ids, "labels": ids.clone()})


def _image_step(model_type: str, batch_size: int) -> Step:
    auto = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassification"}
    own: dict[str, Any] = {} if "image_size" in _OWN.get(model_type, {}) else {"image_size": 64}
    if model_type in {"vit", "deit", "beit", "dinov2", "dinov2_with_registers", "data2vec-vision",
                      "vit_msn", "ijepa", "siglip"}:  # fmt: skip
        own["patch_size"] = 8
    if model_type == "siglip":
        own = {"vision_config": {**_HEADS, **_LAYERS, **_WIDTHS, **_WIDER, **own}}
        own["text_config"] = {"num_hidden_layers": 1, **_WIDTHS, "vocab_size": 100}
        side = 64
    else:
        side = _side(model_type, own)
    name = auto.get(model_type, "AutoModelForImageClassification")
    model = build_model(name, model_type, **own)
    images, labels = torch.randn(batch_size, 3, side, side), torch.randint(2, (batch_size,))
    return _step(model, {"pixel_values": images, "labels": labels})


def _side(model_type: str, own: dict[str, Any]) -> int:
    size = {**_OWN.get(model_type, {}), **own}["image_size"]
    return int(size[0] if isinstance(size, list) else size)


def _speech_step(model_type: str, batch_size: int) -> Step:
    convolutions = {"conv_dim": (64,) * 7, "vocab_size": 32, "feat_extract_norm": "group"}
    if model_type.startswith("sew"):
        convolutions["conv_dim"] = (32,) * 13
    if model_type == "data2vec-audio":
        del convolutions["feat_extract_norm"]
    model = build_model("AutoModelForCTC", model_type, **convolutions)
    batch = {"input_values": torch.randn(batch_size, 16_000)}
    return _step(model, batch | {"labels": torch.randint(3, 32, (batch_size, 8))})


def _clip_step(batch_size: int) -> Step:
    side = {**_HEADS, **_LAYERS, **_WIDTHS, **_WIDER}
    text = {**side, "vocab_size": _VOCABULARY, "max_position_embeddings": 77}
    vision = {**side, "image_size": 64, "patch_size": 8}
    model = build_model("CLIPModel", "clip", text_config=text, vision_config=vision)
    batch = {"input_ids": _tokens(batch_size, 32), "return_loss": True}
    return _step(model, batch | {"pixel_values": torch.randn(batch_size, 3, 64, 64)})


def _vilt_step(batch_size: int) -> Step:
    model = build_model("ViltForQuestionAnswering", "vilt", image_size=64, patch_size=8)
    images, labels = torch.randn(batch_size, 3, 64, 64), torch.rand(batch_size, 2)
    tokens = {"input_ids": _tokens(batch_size, 32)}
    return _step(model, tokens | {"pixel_values": images, "labels": labels})


def _whisper_step(batch_size: int) -> Step:
    model = build_model("WhisperForConditionalGeneration", "whisper", max_source_positions=50)
    sound = torch.randn(batch_size, 80, 100)
    return _step(model, {"input_features": sound, "labels": _tokens(batch_size, 32)})


def _speech_to_text_step(batch_size: int) -> Step:
    model = build_model("Speech2TextForConditionalGeneration", "speech_to_text")
    sound = torch.randn(batch_size, 200, 80)
    return _step(model, {"input_features": sound, "labels": _tokens(batch_size, 32)})


def _spectrogram_step(batch_size: int) -> Step:
    name = "audio-spectrogram-transformer"
    model = build_model("ASTForAudioClassification", name, max_length=128)
    labels = torch.randint(2, (batch_size,))
    return _step(model, {"input_values": torch.randn(batch_size, 128, 128), "labels": labels})


def _series_step(auto: str, model_type: str, batch_size: int) -> Step:
    sizes = {"context_length": 128, "prediction_length": 16, "num_input_channels": 4}
    model = build_model(auto, model_type, **sizes)
    past, future = torch.randn(batch_size, 128, 4), torch.randn(batch_size, 16, 4)
    return _step(model, {"past_values": past, "future_values": future})


def _segmenter_step(batch_size: int) -> Step:
    model = build_model("SegformerForSemanticSegmentation", "segformer", image_size=64)
    images, masks = torch.randn(batch_size, 3, 64, 64), torch.randint(2, (batch_size, 64, 64))
    return _step(model, {"pixel_values": images, "labels": masks})


def _yolos_step(batch_size: int) -> Step:
    own = {"image_size": [64, 64], "patch_size": 8, "num_detection_tokens": 20}
    model = build_model("YolosForObjectDetection", "yolos", **own)
    return _step(model, {"pixel_values": torch.randn(batch_size, 3, 64, 64)})


_OTHERS: dict[str, tuple[str, Callable[[int], Step]]] = {
    "clip": ("multimodal", _clip_step),
    "vilt": ("multimodal", _vilt_step),
    "whisper": ("speech", _whisper_step),
    "speech_to_text": ("speech", _speech_to_text_step),
    "audio-spectrogram-transformer": ("speech", _spectrogram_step),
    "patchtst": ("series", partial(_series_step, "PatchTSTForPrediction", "patchtst")),
    "patchtsmixer": ("series", partial(_series_step, "PatchTSMixerForPrediction", "patchtsmixer")),
    "segformer, semantic": ("vision", _segmenter_step),
    "yolos": ("vision", _yolos_step),
}


def _families() -> Iterator[tuple[str, str, Callable[[int], Step], tuple[int, ...]]]:
    for name in _CAUSAL.split():
        sizes = (
            (1, 2, 4) if "mamba" in name or name in {"jamba", "rwkv", "qwen3_next"} else (2, 8, 24)
        )
        yield name, "decoder", partial(_text_step, "AutoModelForCausalLM", name), sizes
    for name in _MASKED.split():
        yield name, "encoder", partial(_text_step, "AutoModelForMaskedLM", name), (2, 8, 24)
    for name in _SEQUENCE_TO_SEQUENCE.split():
        build = partial(_text_step, "AutoModelForSeq2SeqLM", name)
        yield name, "encoder-decoder", build, (2, 8, 24)
    for name in _IMAGES.split():
        yield name, "vision", partial(_image_step, name), (2, 4, 8)
    for name in _SPEECH.split():
        yield name, "speech", partial(_speech_step, name), (1, 2, 4)
    for name, (family, other) in _OTHERS.items():
        yield name, family, other, (2, 4, 8)


def architectures() -> list[Architecture]:
    """All of them."""
    return [
        Architecture(f"transformers/{name}", family, sizes, build)
        for name, family, build, sizes in _families()
    ]
