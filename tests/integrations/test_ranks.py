"""Trainers and loops on two ranks, one of which splits: what both would train without tenure."""

import os

import pytest
import torch
from torch import nn

from ..adaptive.ranks.launch import run_checks

pytest.importorskip("transformers", reason="the extra transformers is not installed")
from accelerate import Accelerator

from tenure.integrations.accelerate import step
from tenure.integrations.transformers import AdaptiveTrainer

from .test_transformers import Trainer, bert, classes, full, llama, texts, trainer_of


def as_torchrun(rank):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561",
    }  # fmt: skip


def farthest(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


def train_with_too_little_memory_on_the_second(rank, make, data):
    as_torchrun(rank)
    models = [make() for _ in range(3)]
    for kind, model in zip((Trainer, AdaptiveTrainer), models, strict=False):
        arguments = {"optim": "sgd"}
        trainer = trainer_of(kind, model, data, batch=8, steps=3, arguments=arguments)
        if rank and kind is AdaptiveTrainer:
            model.register_forward_pre_hook(full(3), with_kwargs=True)
        trainer.train()
    plain, fitted, untrained = [list(model.parameters()) for model in models]
    assert farthest(fitted, plain) < 1e-9 < farthest(plain, untrained)
    assert torch.distributed.get_world_size() == trainer.args.world_size == 2
    sizes = trainer.adaptive_result.sizes
    assert max(sizes) <= 3 if rank else sizes == (8,)


def tokens(rank):
    train_with_too_little_memory_on_the_second(rank, llama, texts())


def labels(rank):
    # the first way to split its loss that is tried is wrong
    train_with_too_little_memory_on_the_second(rank, bert, classes())


def accelerated(rank):
    as_torchrun(rank)
    found = []
    for is_adaptive in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        assert isinstance(model, nn.parallel.DistributedDataParallel)

        def loss_of(x, model=model):
            return model(x).square().mean()

        torch.manual_seed(1 + rank)
        for _ in range(4):
            # uneven, where a mean of all samples is not the mean of ranks
            x = torch.randn(6 + 3 * rank, 4, dtype=torch.float64)
            with accelerator.accumulate(model):
                if is_adaptive:
                    result = step(accelerator, loss_of, x, **({"maximum": 4} if rank else {}))
                else:
                    accelerator.backward(loss_of(x))
                optimizer.step()
                optimizer.zero_grad()
        found.append(list(net.parameters()))
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == "MULTI_CPU"
    assert farthest(*found) < 1e-10
    assert max(result.sizes) <= 4 if rank else result.sizes == (6,)


@pytest.mark.slow
def test_a_trainer_and_accelerate_train_the_same_when_one_rank_splits():
    run_checks(accelerated, tokens, labels, timeout=200)
