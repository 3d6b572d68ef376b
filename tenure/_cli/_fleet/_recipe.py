"""The program of a setup, to paste: what was predicted is what it runs.

Invariant: no line is longer than 79 characters, and each name is imported or one of `model`,
`batches` and `dataset`, which a reader has.
"""

from __future__ import annotations

from typing import Any

from ._setup import PAGED, Setup

_OPTIMIZERS = {
    "adamw": "AdamW(weights, foreach=False)",
    "adamw-foreach": "AdamW(weights, foreach=True)",
    PAGED: "AdamW(weights)",
    "sgd": "SGD(weights, foreach=False)",
    "adafactor": "Adafactor(weights, foreach=False)",
}


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

    lines = ["import torch"]
    if setup.ranks > 1 and setup.shard == "fsdp2":
        lines += ["from torch.distributed.device_mesh import init_device_mesh"]
        policy = "CPUOffloadPolicy, " if setup.offloads else ""
        lines += [f"from torch.distributed.fsdp import {policy}fully_shard"]
    elif setup.ranks > 1:
        lines += ["from torch.nn.parallel import DistributedDataParallel"]
    if setup.lora is not None:
        lines += ["from peft import LoraConfig, get_peft_model"]
    if maximum is not None:
        lines += ["from tenure.adaptive import step"]
    if setup.optimizer == PAGED:
        lines += ["from tenure.paging import page"]
    lines += [""]
    if setup.dtype is not None:
        lines += [f"model = model.to(torch.{setup.dtype})"]
    if setup.lora is not None:
        lines += ["config = LoraConfig(", f"    r={setup.lora},", f"    lora_alpha={setup.lora},"]
        lines += ['    target_modules="all-linear",', ")"]
        lines += ["model = get_peft_model(model, config)"]
    if setup.checkpointing and setup.lora is not None:
        lines += ["model.enable_input_require_grads()"]
    if setup.checkpointing:
        lines += [f'model.{checkpoints_of(PreTrainedModel)}({{"use_reentrant": False}})']
    if setup.ranks > 1:
        lines += _sharded(setup, blocks)
    if setup.generate is not None:
        return "\n".join(lines)
    if setup.optimizer in _OPTIMIZERS:
        lines += ["weights = [p for p in model.parameters() if p.requires_grad]"]
        lines += [f"optimizer = torch.optim.{_OPTIMIZERS[setup.optimizer]}"]
    loop = [f"for batch in batches:  # with {setup.batch} samples each"]
    if setup.optimizer in _OPTIMIZERS:
        loop += ["    optimizer.zero_grad()"]
    if maximum is None:
        loop += ["    model(**batch).loss.backward()"]
    else:
        loop += ["    step(", "        lambda part: model(**part).loss,"]
        loop += ["        batch,", f"        maximum={maximum},", "    )"]
    if setup.optimizer in _OPTIMIZERS:
        loop += ["    optimizer.step()"]
    if setup.optimizer == PAGED:
        lines += [f'with page(model, "cuda", budget={budget_bytes}, training=True):']
        loop = [f"    {line}" for line in loop]
    lines += loop
    return "\n".join(lines)


def checkpoints_of(model: Any) -> str:
    """Return the name of what turns checkpoints on, which is another since transformers 5.20."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    return new if hasattr(model, new) else old


def _sharded(setup: Setup, blocks: tuple[str, ...]) -> list[str]:
    if setup.shard == "ddp":
        return ["model = DistributedDataParallel(model)"]
    names = "".join(f'"{name}", ' for name in blocks)
    return [
        "options = {",
        f'    "mesh": init_device_mesh("cuda", ({setup.ranks},)),',
        '    "reshard_after_forward": True,',
        *['    "offload_policy": CPUOffloadPolicy(pin_memory=False),'] * setup.offloads,
        "}",
        f"blocks = [{names[:-2]}]" if len(names) < 60 else f"blocks = {' '.join(blocks)!r}.split()",
        "for module in [*model.modules()][::-1]:",
        "    if module is model or type(module).__name__ in blocks:",
        "        fully_shard(module, **options)",
    ]
