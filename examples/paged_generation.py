"""Generate text with a model whose weights don't fit on the device: the tokens are the whole's.

On a machine without an accelerator it runs on a simulated one, with memory for half of the weights
and what generating takes.

    python examples/paged_generation.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tenure.paging import page
from tenure.testing import simulated_accelerator

WORDS, WIDTH, LAYERS, NEW = 256, 128, 8, 12


@contextmanager
def small_device(memory: int) -> Iterator[tuple[torch.device, int | str]]:
    """A device and a budget for weights: what is free on a small one, so much of a real one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        yield found, memory
    else:
        with simulated_accelerator(budget=memory) as simulated:
            yield simulated.device, "auto"


def build() -> LlamaForCausalLM:
    """A small Llama with random weights, which stands for a large one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def generated(model: Any, prompt: Tensor) -> Tensor:
    """The likeliest tokens, one after the other; as transformers types it, no model has this."""
    tokens: Tensor = model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    return tokens.cpu()


def main() -> None:
    """Generate with the whole model on the host, then within a small device, and compare."""
    model = build()
    model.train(False)
    prompt = torch.randint(3, WORDS, (2, 6))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    expected = generated(model, prompt)
    with (
        small_device(weights // 2) as (device, budget),
        page(model, device, budget=budget) as handle,
    ):
        print(str(handle.plan).partition("\n  takes")[0])
        found = generated(model, prompt)
        report = handle.report()
    assert found.equal(expected)
    held = report.resident_bytes + report.ring_bytes
    assert held <= weights // 2
    print(f"{weights / 2**20:.1f} MiB of weights, at most {held / 2**20:.1f} MiB of them at a time")
    print(f"{NEW} tokens for each of {len(prompt)} prompts, the same as of the whole model")


if __name__ == "__main__":
    main()
