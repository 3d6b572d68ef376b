"""Architectures written out here by name, and what other optimizers make of two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks import _networks, _ways_to_train
from benchmarks._training_steps import (
    Architecture,
    MakeOptimizer,
    Step,
    mean_square,
    step_on,
)

_BATCHES = (4, 16, 64)

_BUILDS: dict[str, Callable[[int], Step]] = {
    "mlp": _networks.mlp,
    "deep mlp": partial(_networks.mlp, width=128, depth=24),
    "cnn": partial(_networks.cnn, norm=False),
    "cnn with batch norm": _networks.cnn,
    "depthwise cnn": _networks.depthwise,
    "conv1d": _networks.conv1d,
    "u-net": _networks.unet,
    "upsampling cnn": _networks.upsampling_cnn,
    "bilinear upsampling cnn": partial(_networks.upsampling_cnn, how="bilinear"),
    "vae": _networks.vae,
    "convolutional autoencoder": _networks.conv_vae,
    "gan": _networks.gan,
    "lstm": _networks.recurrent,
    "bidirectional lstm": partial(_networks.recurrent, bidirectional=True),
    "gru": partial(_networks.recurrent, cell=nn.GRU),
    "rnn": partial(_networks.recurrent, cell=nn.RNN),
    "embedding bag, mean": _networks.embedding_bag,
    "embedding bag, sum": partial(_networks.embedding_bag, mode="sum"),
    "embedding bag, max": partial(_networks.embedding_bag, mode="max"),
    "attention by hand": _ways_to_train.gpt,
    "tied weights": partial(_ways_to_train.gpt, tied=True),
    "checkpointed blocks": partial(_ways_to_train.gpt, checkpointed="plain"),
    "reentrant checkpoints": partial(_ways_to_train.gpt, checkpointed="reentrant"),
    "frozen parts": _ways_to_train.frozen_gpt,
    "bfloat16 autocast": _ways_to_train.autocast_gpt,
    "bfloat16": _ways_to_train.bfloat16_gpt,
    "gradient accumulation": _ways_to_train.accumulated_gpt,
    "nn.TransformerEncoder": _ways_to_train.transformer,
    "checkpointed transformer": partial(_ways_to_train.transformer, checkpointed=True),
    "nn.Transformer": _ways_to_train.translator,
    "custom autograd.Function": _ways_to_train.custom_function,
    "physics-informed": _ways_to_train.physics_informed,
    "mixture of experts": _ways_to_train.mixture,
    "graph network": _ways_to_train.graph,
    "gaussian process": _ways_to_train.matrix_factors,
    "fourier layer": _ways_to_train.spectral,
    "contrastive": _ways_to_train.contrastive,
    "ctc": _ways_to_train.ctc,
}
_FEW: dict[str, Callable[[int], Step]] = {
    "conv3d": _networks.conv3d,
    "gradient penalty": _ways_to_train.gradient_penalty,
}

_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "SGD, foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "Adam": partial(torch.optim.Adam, foreach=False),
    "Adam, foreach": partial(torch.optim.Adam, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}


def architectures() -> list[Architecture]:
    """All of them, and what other optimizers than AdamW make of two."""
    found = [Architecture(f"plain/{name}", "plain", _BATCHES, b) for name, b in _BUILDS.items()]
    found += [Architecture(f"plain/{name}", "plain", (1, 4, 8), b) for name, b in _FEW.items()]
    return [*found, *_optimized()]


def _optimized() -> Iterator[Architecture]:
    for name, make in _OPTIMIZERS.items():
        yield Architecture(f"optimizers/{name}", "optimizers", (2, 8, 32), _ways_to_train.gpt, make)
    layers_only = partial(_networks.mlp, width=256)
    yield Architecture("optimizers/Muon", "optimizers", _BATCHES, muon_mlp, torch.optim.Muon)
    for foreach in (False, True):
        adam = partial(torch.optim.Adam, foreach=foreach)
        name = f"optimizers/Adam, mlp{', foreach' * foreach}"
        yield Architecture(name, "optimizers", _BATCHES, layers_only, adam)


def muon_mlp(batch_size: int) -> Step:
    """Only matrices, as Muon wants."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256, bias=False), nn.ReLU()]
    return step_on(nn.Sequential(*layers), mean_square, torch.randn(batch_size, 256))
