"""Which Trainers can't be made to fit: told by name, when they are defined or before they run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from transformers import Trainer
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from tenure._errors import AdaptiveUsageError


def refuse_class(cls: type, mixin: type) -> None:
    """Make sure that the methods of the mixin are reached.

    Raises:
        AdaptiveUsageError: a class stands before the mixin, and hides them.
    """
    before = cls.__mro__[: cls.__mro__.index(mixin)]
    if Trainer in before:
        raise AdaptiveUsageError(
            f"{cls.__name__} has {mixin.__name__} behind a Trainer, whose methods hide those of "
            f"the mixin: nothing would be adaptive. Write it first: class {cls.__name__}"
            f"({mixin.__name__}, ...)."
        )
    for kind, name in product(before, ("training_step", "prediction_step")):
        code = getattr(vars(kind).get(name), "__code__", None)
        # one that calls super() reaches the mixin
        if code is not None and "super" not in code.co_names:
            raise AdaptiveUsageError(
                f"{kind.__name__}.{name}() hides that of {mixin.__name__} and does not call "
                f"super(): nothing would be adaptive. Call super().{name}(), or define it in a "
                f"Trainer of its own, and write class {cls.__name__}({mixin.__name__}, "
                "ThatTrainer)."
            )


def refuse_training(trainer: Trainer) -> None:
    """Make sure that each step of a trainer may be split and begun again.

    Raises:
        AdaptiveUsageError: it may not.
    """
    reason = next(_reasons(trainer), None)
    if reason is not None:
        raise AdaptiveUsageError(f"{type(trainer).__name__} can't train: {reason} Nothing was run.")


def _reasons(trainer: Trainer) -> Iterator[str]:
    args, optimizer = trainer.args, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True begins the training anew with smaller batches, which is "
            "another training; here each batch is split and keeps its size. Leave it out."
        )
    if "layerwise" in optimizer or "lomo" in optimizer:
        yield (
            f"optim={optimizer!r} moves parameters inside the backward pass, where an attempt that "
            "runs out of memory can't be taken back. Use one that steps after it."
        )
    if args.n_gpu > 1:
        yield (
            f"torch.nn.DataParallel on {args.n_gpu} devices splits batches by itself. Launch one "
            "process for each device with torchrun, or show it one with CUDA_VISIBLE_DEVICES."
        )
    if trainer.is_deepspeed_enabled:
        yield (
            "DeepSpeed's engine counts each backward pass as a micro-batch of its own, and reduces "
            "gradients in it. Set its micro-batch size in its configuration, and use Trainer."
        )
    if trainer.is_fsdp_enabled and args.world_size > 1:
        yield (
            "FSDP runs collectives in every pass, so that a split can't be compared with the whole "
            "on one rank, and how this loss adds up is not known without that. Use Trainer with "
            "batches that fit; or call tenure.adaptive.step() in a loop of your own, and say what "
            "the loss is."
        )
    yield from _reasons_of_many_ranks(trainer)


def _reasons_of_many_ranks(trainer: Trainer) -> Iterator[str]:
    if is_sagemaker_mp_enabled():
        yield "SageMaker's model parallelism runs forward and backward itself. Use Trainer."
    if getattr(trainer, "is_distributed_loading_by_transformers", False) or getattr(
        trainer.accelerator, "parallelism_config", None
    ):
        yield (
            "tensor, context or sequence parallelism exchanges data in each forward pass, and "
            "ranks that split differently would wait for each other. Use Trainer."
        )
