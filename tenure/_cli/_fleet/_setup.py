"""What a user asks about: a model, its batch, how it is trained or run, and on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._errors import CommandError
from tenure._text import counted

PAGED = "paged"


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

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            CommandError: a model that generates is given what only training has.
        """
        if self.optimizer == PAGED and self.ranks > 1:
            raise CommandError(
                "--optimizer paged is for one device. Leave out --ranks, or take --optimizer adamw."
            )
        if self.offloads and (self.ranks == 1 or self.shard != "fsdp2"):
            raise CommandError(
                "--cpu-offload is for shards: give --ranks above 1, and --shard fsdp2. On one "
                "device --optimizer paged has weights, gradients and AdamW in host memory."
            )
        if self.generate is None:
            return
        given = {"--lora": self.lora, "--checkpointing": self.checkpointing}
        for option, value in given.items():
            if value:
                raise CommandError(
                    f"{option} is for training. Leave it out, or leave out --generate."
                )
        if self.ranks > 1 and self.shard == "ddp":
            raise CommandError(
                "DDP exchanges gradients, and generating makes none: each rank takes what one "
                "takes. Leave out --ranks, or shard the weights with --shard fsdp2."
            )

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
