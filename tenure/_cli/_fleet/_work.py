"""The work of a setup, made without data: what each rank runs, and what it holds before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._errors import CommandError
from tenure._torch.fake_ranks import fake_ranks
from tenure._without_data import without_data

from ._configured import Batch, Configured
from ._setup import OPTIMIZERS, Setup

# As DistributedDataParallel has them where nobody says otherwise.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


class Size(NamedTuple):
    """The size of a model.

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
        model = found.model(setup)
    return model, found.batch(setup.batch, device)


def _made(setup: Setup, found: Configured, mesh: Any) -> Made:
    with without_data(has_rows=True):
        model = found.model(setup)
        size = size_of(model)
        if mesh is not None and setup.shard == "fsdp2":
            shard(model, mesh, offloads=setup.offloads)
        elif mesh is not None:
            model = _ReplicaModel(model)
        optimizer = None
        if setup.generate is None and setup.optimizer in OPTIMIZERS:
            name, foreach = OPTIMIZERS[setup.optimizer]
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = getattr(torch.optim, name)(params, foreach=foreach)

    def work(batch: Batch) -> Tensor | None:
        if setup.generate is not None:
            return _generate(model, batch, setup.generate)
        # what else the model returns is let go of before the backward pass, as trainers do
        loss: Tensor = model(**batch).loss
        return loss

    return Made(work, optimizer, size)


def shard(model: nn.Module, mesh: Any, *, offloads: bool) -> None:
    """Shard a model over a mesh by FSDP2: each of its own blocks, and the rest."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for module in (*_blocks(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return what transformers keeps on one device each; where it names none, what is in lists."""
    named = dict(model.named_modules())
    classes = {
        name for each in named.values() for name in getattr(each, "_no_split_modules", None) or ()
    }
    found = {name: each for name, each in named.items() if type(each).__name__ in classes}
    found.pop("", None)
    if not found:
        found = {
            name: each
            for name, each in named.items()
            if isinstance(named.get(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
            and type(each).forward is not nn.Module.forward
        }
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    # the outermost, each with parameters; weights that are tied to others, as BERT's words, are
    # sharded with the rest
    return [
        each
        for name, each in found.items()
        if (names := [owner for p in each.parameters() for owner in owners[id(p)]])
        and all(owner.startswith(f"{name}.") for owner in names)
        and not any(name.startswith(f"{other}.") for other in found)
    ]


class _ReplicaModel(nn.Module):
    """A model with what DistributedDataParallel holds besides: gradients once more, in buckets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        # the buckets have one type each, in the order in which gradients come
        filled: dict[torch.dtype, int] = {}
        limits: dict[torch.dtype, int] = {}
        buckets: list[tuple[int, torch.dtype]] = []
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            dtype = parameter.dtype
            filled[dtype] = filled.get(dtype, 0) + parameter.numel()
            if filled[dtype] * dtype.itemsize >= limits.get(dtype, _FIRST_BUCKET_BYTES):
                buckets.append((filled.pop(dtype), dtype))
                limits[dtype] = _BUCKET_BYTES
        buckets += [(n_elements, dtype) for dtype, n_elements in filled.items()]
        for i, (n_elements, dtype) in enumerate(buckets):
            self.register_buffer(f"bucket_{i}", torch.zeros(n_elements, dtype=dtype))

    def forward(self, **batch: Tensor) -> Any:
        return self.module(**batch)


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
        # as the steps between them do
        own = getattr(cache, "self_attention_cache", cache)
        for i, layer in enumerate(own.layers):
            kept = layer.keys, layer.values
            own.update(*(t.new_zeros(*t.shape[:2], n_tokens - 2, t.shape[3]) for t in kept), i)
        name = "cache" if "cache" in known else "past_key_values"
        _cache_of(model(**later, **options, **{name: cache}))


def _cache_of(output: Any) -> Any:
    """Return the cache of a step that has chosen its tokens, as generating chooses them."""
    # by its numbers in float32
    output["logits"][:, -1].to(torch.float32, copy=True)
    found = [output[name] for name in ("cache", "past_key_values") if name in output]
    cache = found[0] if found else None
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [0])
    if not all(isinstance(getattr(each, "keys", None), Tensor) for each in layers):
        raise CommandError(
            "This model keeps something else than keys and values while it generates. Write a "
            "function that generates as your program does, and ask with MODULE:FUNCTION."
        )
    return cache
