"""The work of a setup, made without data: what each rank runs, and what it holds before."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._errors import CommandError
from tenure._torch.fake_ranks import fake_ranks
from tenure._without_data import without_data

from .._fitting import first_line
from ._configured import Configured
from ._recipe import checkpoints_of
from ._setup import Setup

Batch = dict[str, Tensor]
_MIB = 2**20
# As DistributedDataParallel has them where nobody says otherwise.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = _MIB, 25 * _MIB
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, foreach=False),
    "adafactor": lambda params: torch.optim.Adafactor(params, foreach=False),
}


class Size(NamedTuple):
    """How large a model is.

    Attributes:
        n_parameters: of the whole model.
        n_trained: how many of them are trained.
        blocks: the classes of the blocks that are sharded one by one.
    """

    n_parameters: int
    n_trained: int
    blocks: tuple[str, ...]


class Made(NamedTuple):
    """The work of a rank.

    Attributes:
        fn: a function of a batch, for `predict_peak` and `step`.
        optimizer: steps after the backward pass, or None.
        size: that of the whole model.
    """

    fn: Callable[[Batch], Any]
    optimizer: Optimizer | None
    size: Size


@contextmanager
def making(setup: Setup, found: Configured, rank: int = 0) -> Iterator[Made]:
    """Return a block in which the work of one rank is there, on tensors without data.

    Raises:
        CommandError: the model can't be made so.
    """
    if setup.ranks == 1:
        yield _made(setup, found, None)
        return
    with fake_ranks(rank, setup.ranks):
        from torch.distributed.device_mesh import init_device_mesh

        # outside of what makes tensors without data: a mesh reads its ranks
        yield _made(setup, found, init_device_mesh("cpu", (setup.ranks,)))


def in_memory(setup: Setup, found: Configured, device: torch.device) -> tuple[nn.Module, Batch]:
    """Make the model and its batch on a device, as ``meta``."""
    with device:
        model = _model(setup, found)
    return model, batch_of(setup, found, device)


def batch_of(setup: Setup, found: Configured, device: torch.device | None = None) -> Batch:
    """Make what the model is called with, of ``meta`` unless a device is named."""
    n_tokens, n_images = found.tokens(setup.sequence), found.images(setup.images)
    return found.batch(setup.batch, n_tokens, n_images, device or torch.device("meta"))


def _made(setup: Setup, found: Configured, mesh: Any) -> Made:
    trains = setup.generate is None
    with without_data(has_rows=True):
        model = _model(setup, found)
        size = size_of(model)
        if mesh is not None and setup.shard == "fsdp2":
            shard(model, mesh, offloads=setup.offloads)
        elif mesh is not None:
            model = _ReplicaModel(model)
        optimizer = None
        if trains and setup.optimizer in _OPTIMIZERS:
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = _OPTIMIZERS[setup.optimizer](params)

    def train(batch: Batch) -> Tensor:
        # what else the model returns is let go of before the backward pass, as trainers do
        loss: Tensor = model(**batch).loss
        return loss

    def generate(batch: Batch) -> None:
        assert setup.generate is not None
        _generate(model, batch, setup.generate)

    fn = train if trains else generate
    return Made(fn, optimizer, size)


def _model(setup: Setup, found: Configured) -> nn.Module:
    with warnings.catch_warnings():
        # what these libraries tell each other of their next releases
        warnings.simplefilter("ignore", FutureWarning)
        model = found.model(None if setup.dtype is None else getattr(torch, setup.dtype))
        if setup.lora is not None:
            model = _with_adapters(model, setup.lora)
        if setup.checkpointing:
            _checkpoint(model)
    return model.train(setup.generate is None)


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise CommandError('LoRA is that of peft. Install it with: pip install "peft".') from None
    try:
        adapted: nn.Module = peft.get_peft_model(
            model,
            peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"),
        )
    except ValueError as error:
        told = first_line(error)
        raise CommandError(f"peft puts no LoRA into a {type(model).__name__}: {told}.") from None
    return adapted


def _checkpoint(model: Any) -> None:
    try:
        getattr(model, checkpoints_of(model))({"use_reentrant": False})
        # of adapters alone no input would lead to a gradient
        model.enable_input_require_grads()
    except (ValueError, NotImplementedError, AttributeError) as error:
        told = first_line(error)
        raise CommandError(f"A {type(model).__name__} has no checkpoints: {told}.") from None


def shard(model: nn.Module, mesh: Any, *, offloads: bool) -> None:
    """Shard a model over a mesh by FSDP2: each of its own blocks, and the rest."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for module in (*_blocks(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return what transformers keeps on one device each; where it names none, what is in lists."""
    classes = {
        name for each in model.modules() for name in getattr(each, "_no_split_modules", None) or ()
    }
    found = {
        name: each
        for name, each in model.named_modules()
        if name and type(each).__name__ in classes
    }
    if not found:
        lists = (nn.ModuleList, nn.Sequential)
        found = {
            f"{name}.{key}": child
            for name, each in model.named_modules()
            if isinstance(each, lists)
            for key, child in each.named_children()
            if type(child).forward is not nn.Module.forward
        }
    # the outermost, each with parameters
    return [
        each
        for name, each in found.items()
        if any(True for _ in each.parameters())
        and not any(name.startswith(f"{other}.") for other in found)
    ]


class _ReplicaModel(nn.Module):
    """A model with what DistributedDataParallel holds besides: gradients once more, in buckets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        for i, each in enumerate(_buckets(model)):
            self.register_buffer(f"bucket_{i}", each)

    def forward(self, **batch: Tensor) -> Any:
        return self.module(**batch)


def _buckets(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buckets of gradients, each of one type, in the order in which gradients come."""
    filled: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        dtype = parameter.dtype
        filled[dtype] = filled.get(dtype, 0) + parameter.numel()
        if filled[dtype] * dtype.itemsize >= limits.get(dtype, _FIRST_BUCKET_BYTES):
            yield torch.zeros(filled.pop(dtype), dtype=dtype)
            limits[dtype] = _BUCKET_BYTES
    for dtype, n_elements in filled.items():
        yield torch.zeros(n_elements, dtype=dtype)


def size_of(model: nn.Module) -> Size:
    """Count a model that is whole."""
    params = list(model.parameters())
    return Size(
        sum(p.numel() for p in params),
        sum(p.numel() for p in params if p.requires_grad),
        tuple(sorted({type(each).__name__ for each in _blocks(model)})),
    )


@torch.no_grad()
def _generate(model: nn.Module, batch: Batch, n_tokens: int) -> None:
    """Run the two moments of which one is the peak: the first token, and the last.

    Between them each step only makes the cache longer by a token, and takes less than the last.
    """
    known = inspect.signature(model.forward).parameters
    ids = batch["input_ids"]
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in known:
        options["logits_to_keep"] = 1
    given = {name: each for name, each in batch.items() if name != "labels"}
    later: dict[str, Any] = {"input_ids": ids[:, :1]}
    if "decoder_input_ids" in known:
        encoder: Any = model.get_encoder()  # type: ignore[operator]  # as transformers has it
        encoded = {"encoder_outputs": encoder(input_ids=ids)}
        given = later = {**encoded, "decoder_input_ids": ids[:, :1]}
    cache = _cache_of(model(**given, **options))
    if n_tokens > 1:
        _lengthen(cache, n_tokens - 2)
        name = "cache" if "cache" in known else "past_key_values"
        _cache_of(model(**later, **options, **{name: cache}))


def _cache_of(output: Any) -> Any:
    """Return the cache of a step that has chosen its tokens, as generating chooses them."""
    # by its numbers in float32
    output["logits"][:, -1].to(torch.float32, copy=True)
    found = [output[name] for name in ("cache", "past_key_values") if name in output]
    cache = found[0] if found else None
    own = getattr(cache, "self_attention_cache", cache)
    if not all(
        isinstance(getattr(each, "keys", None), Tensor) for each in getattr(own, "layers", [0])
    ):
        raise CommandError(
            "This model keeps something else than keys and values while it generates. Write a "
            "function that generates as your program does, and ask with MODULE:FUNCTION."
        )
    return cache


def _lengthen(cache: Any, n_tokens: int) -> None:
    """Make a cache longer, as so many steps do."""
    own = getattr(cache, "self_attention_cache", cache)
    for i, layer in enumerate(own.layers):
        more = [
            each.new_zeros(*each.shape[:2], n_tokens, each.shape[3])
            for each in (layer.keys, layer.values)
        ]
        own.update(*more, i)
