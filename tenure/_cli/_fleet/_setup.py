"""The work that a user asks about, in words and as the program that does it.

Invariant: no line of the program is longer than 79 characters, and each name is imported or one of
`model`, `batches` and `dataset`, which a reader has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenure._text import counted

PAGED = "paged"
OPTIMIZERS: dict[str, tuple[str, bool]] = {
    "adamw": ("AdamW", False),
    "adamw-foreach": ("AdamW", True),
    "sgd": ("SGD", False),
    "adafactor": ("Adafactor", False),
}
"""Of each name of an optimizer the class in torch, and its ``foreach``."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One piece of work.

    Attributes:
        target: a folder with a ``config.json``, the path of such a file, or a name in the cache of
            transformers.
        batch: the samples of each rank.
        sequence: the tokens of a sample; None: what the model is made for, 2048 at most.
        images: in the text of a sample; None: one if the model takes images.
        dtype: of the weights, by its name in torch; None: as the configuration says.
        optimizer: "adamw", "adamw-foreach", "sgd", "adafactor", "paged" or "none", in training.
        lora: the rank of adapters, if only these are trained.
        checkpointing: whether activations are computed again in the backward pass.
        generate: how many tokens are generated; None: the model is trained.
        ranks: how many processes run it, each with a device.
        shard: "fsdp2" or "ddp".
        offloads: whether FSDP2 keeps shards, gradients and the optimizer's state in host memory.
    """

    target: str
    batch: int = 1
    sequence: int | None = None
    images: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    lora: int | None = None
    checkpointing: bool = False
    generate: int | None = None
    ranks: int = 1
    shard: str = "fsdp2"
    offloads: bool = False

    def words(self) -> str:
        """Spell what runs, for the line above the figures."""
        offloads = ", offloaded to host memory" if self.offloads else ""
        shard = f"{self.shard}{offloads}"
        how = "" if self.ranks == 1 else f" on each of {self.ranks} ranks ({shard})"
        if self.generate is not None:
            return f"{counted(self.generate, 'token')} generated{how}"
        optimizers = {
            "none": "without an optimizer",
            PAGED: "with weights, gradients and AdamW paged to host memory",
        }
        with_ = optimizers.get(self.optimizer, f"with {self.optimizer}")
        lora = "" if self.lora is None else f", LoRA of rank {self.lora}"
        checkpoints = ", with checkpoints" if self.checkpointing else ""
        return f"a training step {with_}{lora}{checkpoints}{how}"


def recipe(
    setup: Setup, *, blocks: tuple[str, ...], maximum: int | None = None, budget_bytes: int = 0
) -> str:
    """Return the lines that train as a setup says.

    Args:
        setup: what runs.
        blocks: the classes that are sharded one by one.
        maximum: the most samples of a micro-batch, if the batch is split.
        budget_bytes: that of a paged model.
    """
    from transformers import PreTrainedModel

    is_sharded = setup.ranks > 1 and setup.shard == "fsdp2"
    is_replica, is_paged = setup.ranks > 1 and not is_sharded, setup.optimizer == PAGED
    policy = "CPUOffloadPolicy, " if setup.offloads else ""
    names = ", ".join(f'"{name}"' for name in blocks)
    named = f"[{names}]" if len(names) < 58 else f"{' '.join(blocks)!r}.split()"
    optimizer, foreach = OPTIMIZERS.get(setup.optimizer, ("AdamW", None))
    options = "" if foreach is None else f", foreach={foreach}"
    steps = setup.generate is None and setup.optimizer != "none"
    lines = {
        "import torch": True,
        "from torch.distributed.device_mesh import init_device_mesh": is_sharded,
        f"from torch.distributed.fsdp import {policy}fully_shard": is_sharded,
        "from torch.nn.parallel import DistributedDataParallel": is_replica,
        "from peft import LoraConfig, get_peft_model": setup.lora is not None,
        "from tenure.adaptive import step": maximum is not None,
        "from tenure.paging import page": is_paged,
        "": True,
        f"model = model.to(torch.{setup.dtype})": setup.dtype is not None,
        f"config = LoraConfig(\n    r={setup.lora},\n    lora_alpha={setup.lora},\n"
        '    target_modules="all-linear",\n)\n'
        "model = get_peft_model(model, config)": setup.lora is not None,
        "model.enable_input_require_grads()": setup.checkpointing and setup.lora is not None,
        f'model.{checkpoints_of(PreTrainedModel)}({{"use_reentrant": False}})': setup.checkpointing,
        "model = DistributedDataParallel(model)": is_replica,
        f'options = {{\n    "mesh": init_device_mesh("cuda", ({setup.ranks},)),\n'
        '    "reshard_after_forward": True,': is_sharded,
        '    "offload_policy": CPUOffloadPolicy(pin_memory=False),': setup.offloads,
        f"}}\nblocks = {named}\n"
        "for module in [*model.modules()][::-1]:\n"
        "    if module is model or type(module).__name__ in blocks:\n"
        "        fully_shard(module, **options)": is_sharded,
        "weights = [p for p in model.parameters() if p.requires_grad]\n"
        f"optimizer = torch.optim.{optimizer}(weights{options})": steps,
        f'with page(model, "cuda", budget={budget_bytes}, training=True):': is_paged,
    }
    loop = {
        f"for batch in batches:  # with {setup.batch} samples each": True,
        "    optimizer.zero_grad()": steps,
        "    model(**batch).loss.backward()": maximum is None,
        "    step(\n        lambda part: model(**part).loss,\n        batch,\n"
        f"        maximum={maximum},\n    )": maximum is not None,
        "    optimizer.step()": steps,
    }
    before = "    " if is_paged else ""
    if setup.generate is None:
        lines |= {before + text.replace("\n", f"\n{before}"): is_in for text, is_in in loop.items()}
    return "\n".join(text for text, is_in in lines.items() if is_in)


def checkpoints_of(model: Any) -> str:
    """Return the name of what turns checkpoints on, which is another since transformers 5.23."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    return new if hasattr(model, new) else old
