"""Train LoRA adapters of a transformer whose frozen base is larger than the device may hold.

On a machine without an accelerator it runs on a simulated one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tenure.paging import page
from tenure.testing import simulated_accelerator

# transformers has renamed what peft asks it
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

WIDTH, LAYERS, WORDS, LENGTH, STEPS = 64, 3, 32, 8, 8


@contextmanager
def device() -> Iterator[torch.device]:
    """The accelerator of this machine, or a simulated one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        yield found
    else:
        with simulated_accelerator() as simulated:
            yield simulated.device


def build() -> PeftModel:
    """A small Llama with random weights, which stands for a large one, and its adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        initializer_range=0.1,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    # Each block is computed again in the backward pass, so that its activations are not kept.
    model.activation_checkpointing_enable()
    model.enable_input_require_grads()
    return model


def main() -> None:
    """Learn one sentence by heart, with the base passing through half of its size."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    words = torch.randint(WORDS, (1, LENGTH))
    losses = []
    with device() as there, page(model, there, budget=weights // 2, training=True) as handle:
        print(str(handle.plan).partition("\n    ")[0])
        for _ in range(STEPS):
            logits = model(input_ids=words).logits[0]
            loss = cross_entropy(logits[:-1], words[0, 1:].to(there))
            loss.backward()
            # On the host, where the adapters, their gradients and the optimizer's state are.
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        adapters = get_peft_model_state_dict(model)
    share = sum(p.nbytes for p in trained) / weights
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(f"trained {share:.0%} of {weights / 2**20:.1f} MiB: {len(adapters)} tensors to save")
    assert losses[-1] < 0.5 * losses[0]
    assert all(each.device.type == "cpu" for each in adapters.values())


if __name__ == "__main__":
    main()
