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

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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


def make_trainer(kind: type[Trainer], options: argparse.Namespace, folder: str) -> Trainer:
    """A trainer of a new model, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=options.length,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
        learning_rate=5e-4, logging_steps=max(options.steps // 4, 1), save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callbacks = [MemoryCallback()]
    return kind(
        LlamaForCausalLM(config), arguments, train_dataset=Text(options.length), callbacks=callbacks
    )


def main() -> None:
    """Train three times, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.basicConfig(stream=sys.stdout, format="  %(message)s")

    with tempfile.TemporaryDirectory() as folder:
        print("A large machine:")
        plain = make_trainer(Trainer, options, folder)
        with memory_budget("8GiB") as large:
            plain.train()
        limit = large.peak_bytes // 3
        print(f"It took {large.peak_bytes >> 20} MiB. With {limit >> 20} MiB, the Trainer:")
        try:
            with memory_budget(limit):
                make_trainer(Trainer, options, folder).train()
        except torch.OutOfMemoryError as error:
            print(f"  {str(error).split('.')[0]}.")
        print("And AdaptiveTrainer:")
        fitted = make_trainer(AdaptiveTrainer, options, folder)
        with memory_budget(limit):
            fitted.train()

    pairs = zip(plain.model.parameters(), fitted.model.parameters(), strict=True)
    largest = max((one - other).abs().max().item() for one, other in pairs)
    print(f"Parameters differ by {largest:.1e} at the most.")


if __name__ == "__main__":
    main()
