"""A Trainer of transformers on a machine that is too small for its batch.

The same training three times: on a machine that is large enough; with the Trainer on one that has a
third of the memory; and there with AdaptiveTrainer, which is what changes. The text is the language
reference that comes with Python, its bytes are the tokens.

    python examples/trainer.py --steps 20 --batch 32
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pydoc_data.topics import topics
from typing import Any, cast

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tenure.adaptive import memory_budget
from tenure.integrations.transformers import AdaptiveTrainer, MemoryCallback


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text, one byte a token."""

    def __init__(self, length: int) -> None:
        text = "\n".join(topics.values()).encode()
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index * self.length :][: self.length]
        return {"input_ids": tokens, "labels": tokens}


def train(kind: type[Trainer], options: argparse.Namespace, limit: int | str) -> tuple[Any, int]:
    """Train a new model, always the same, in so much memory; the model, and the bytes it took."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=options.length,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
            learning_rate=5e-4, logging_steps=max(options.steps // 4, 1), save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data, watch = Text(options.length), cast("TrainerCallback", MemoryCallback())
        trainer = kind(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[watch])
        with memory_budget(limit) as budget:
            trainer.train()
    return trainer.model, budget.peak_bytes


def main() -> None:
    """Train three times, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.basicConfig(stream=sys.stdout, format="  %(message)s")

    print("A large machine:")
    plain, peak = train(Trainer, options, "8GiB")
    limit = peak // 3
    print(f"It took {peak >> 20} MiB. The Trainer with {limit >> 20} MiB:")
    try:
        train(Trainer, options, limit)
    except torch.OutOfMemoryError as error:
        print(f"  {str(error).split('.')[0]}.")
    print("And AdaptiveTrainer:")
    fitted, _ = train(AdaptiveTrainer, options, limit)

    pairs = zip(plain.parameters(), fitted.parameters(), strict=True)
    largest = max((one - other).abs().max().item() for one, other in pairs)
    print(f"Parameters differ by {largest:.1e} at the most.")


if __name__ == "__main__":
    main()
