"""The code of the pages on paging that needs an accelerator, run on the simulated one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from .models import WIDTH, mlp

_DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r'<!-- skip: next "needs an accelerator[^"]*" -->\n```python\n(.*?)```', re.DOTALL
)
pytestmark = pytest.mark.skipif(not _DOCS.exists(), reason="runs where the docs are")
TOKENS = torch.ones(1, 8, dtype=torch.long)


class Language(nn.Module):
    """A model that is called with tokens, and generates."""

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(WIDTH, WIDTH), mlp()

    def forward(self, input_ids):
        return self.layers(self.words(input_ids))

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens):
        return self(prompt).argmax(-1)


class Autoencoder(nn.Linear):
    def decode(self, z):
        return self(z)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(2))


def run_blocks(page, *models, **names):
    """Run the blocks of a page in one namespace, each with the model that it speaks of."""
    blocks = _BLOCK.findall((_DOCS / page).read_text("utf-8"))
    for block, model in zip(blocks, models, strict=True):
        names |= {} if model is None else {"model": model}
        code = block.replace('"cuda"', '"sim"').replace(".cuda()", '.to("sim")')
        exec(compile(code, page, "exec"), names)
    return names


def test_a_model_larger_than_memory(sim):
    x = torch.ones(2, WIDTH)
    language, several = Language().eval(), {"text_encoder": mlp(), "transformer": mlp()}
    names = run_blocks(
        "paging.md", None, language, language, None, Blocks(),
        build_large_model=mlp, x=x, tokens=TOKENS, prompt=TOKENS,
        vae=Autoencoder(WIDTH, WIDTH), **several,
    )  # fmt: skip
    assert names["output"].shape == x.shape
    assert names["tokens"].shape == TOKENS.shape
    assert names["plan"].peak_bytes > names["plan"].activation_bytes > 0
    assert names["shared"].held_bytes > 0
    assert not names["handle"].closed


def test_training(sim):
    batches = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * 2
    names = run_blocks(
        "paging-training.md", None, None, None,
        build_large_model=mlp, batches=batches, criterion=nn.functional.mse_loss,
    )  # fmt: skip
    assert all(p.grad is not None for p in names["model"].parameters())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora_and_a_trainer(sim, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=WIDTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    dataset = [{key: value[0] for key, value in batch.items()}] * 8
    names = run_blocks("paging-lora.md", None, None, base=base, batches=[batch], dataset=dataset)
    trained = [p for name, p in names["model"].named_parameters() if "lora_B" in name]
    assert all(p.count_nonzero() for p in trained)  # they begin with zeros
