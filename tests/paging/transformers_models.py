"""Small models of transformers, each with something that pagers stumble over."""

import torch
import transformers

_WORDS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TEXT = {**_WORDS, **_LAYERS, "num_key_value_heads": 2}
_IMAGES = {**_LAYERS, "image_size": 16, "patch_size": 8}
_CONFIGURATIONS = {
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        **_WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "LlamaForCausalLM": lambda **options: transformers.LlamaConfig(**_TEXT | options),
    "MixtralForCausalLM": lambda **options: transformers.MixtralConfig(
        **_TEXT, num_local_experts=4, **options
    ),
    "BeitModel": lambda: transformers.BeitConfig(**_IMAGES, use_relative_position_bias=True),
    "XLNetModel": lambda: transformers.XLNetConfig(
        vocab_size=60, d_model=32, n_layer=3, n_head=2, d_inner=64
    ),
    "ViTModel": lambda: transformers.ViTConfig(**_IMAGES),
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config={"model_type": "clip_vision_model", **_IMAGES},
        image_token_index=59,
    ),
}


def build(name, seed=0, **options):
    torch.manual_seed(seed)
    return getattr(transformers, name)(_CONFIGURATIONS[name](**options)).eval()
