"""Trainers on several ranks, one of which runs out of memory: what all would train with enough."""

import os

import pytest

from ..adaptive.ranks.launch import run_ranks

pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytestmark = pytest.mark.slow


def _as_torchrun(rank, n=2):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561",
    }  # fmt: skip


class _Fails:
    """A hook of a module that raises on one rank where it gets more samples than allowed."""

    def __init__(self, most):
        self.most = most

    def __call__(self, module, args, kwargs):
        import torch

        if self.most is not None and len(kwargs["input_ids"]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def trainer_on(rank, folder, most, kind_of_loss):
    """How far parameters are from those of the Trainer of the library, and what this rank ran."""
    _as_torchrun(rank)
    import torch

    from tenure.integrations.transformers import AdaptiveTrainer

    from .test_transformers import (
        BertForSequenceClassification,
        Trainer,
        bert,
        classes,
        llama,
        texts,
        trainer_of,
    )

    def make():
        # the first way to split its loss that is tried is wrong
        is_of_tokens = kind_of_loss == "tokens"
        return llama() if is_of_tokens else bert(BertForSequenceClassification)

    data = texts() if kind_of_loss == "tokens" else classes()

    found = []
    for kind in (Trainer, AdaptiveTrainer):
        model = make()
        trainer = trainer_of(
            kind, folder, model, data, batch=8, steps=3, arguments={"optim": "sgd"}
        )
        if kind is AdaptiveTrainer:
            fails = _Fails(most if rank else None)
            model.register_forward_pre_hook(fails, with_kwargs=True)
        trainer.train()
        found.append([p.detach().clone() for p in model.parameters()])
    gap = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    moved = max(
        float((a - b.detach()).abs().max())
        for a, b in zip(found[0], make().parameters(), strict=True)
    )
    assert torch.distributed.get_world_size() == trainer.args.world_size == 2
    return gap, moved, trainer.adaptive_result.sizes


@pytest.mark.parametrize("kind", ["tokens", "classes"])
def test_a_trainer_whose_second_rank_splits_trains_as_one_with_enough_memory(tmp_path, kind):
    first, second = run_ranks(
        trainer_on, folder=str(tmp_path), most=3, kind_of_loss=kind, timeout=100
    )
    for gap, moved, _ in (first, second):
        assert gap < 1e-9 < moved
    assert first[2] == [8]
    assert max(second[2]) <= 3


def accelerated_on(rank):
    _as_torchrun(rank)
    import torch
    from accelerate import Accelerator

    from tenure.integrations.accelerate import step

    found, sizes = [], []
    for is_adaptive in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        net = net.double()
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        torch.manual_seed(1 + rank)
        for _ in range(2):
            # uneven, where a mean of all samples is not the mean of ranks
            x = torch.randn(6 + 3 * rank, 4, dtype=torch.float64)
            if is_adaptive:
                options = {"maximum": 4} if rank else {}
                sizes = step(
                    accelerator, lambda x, m=model: m(x).square().mean(), x, **options
                ).sizes
            else:
                accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    assert accelerator.num_processes == 2
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), sizes


def test_accelerate_averages_gradients_of_ranks_that_split_differently():
    first, second = run_ranks(accelerated_on, timeout=100)
    assert first[0] < 1e-10
    assert second[0] < 1e-10
    assert first[1] == [6]
    assert max(second[1]) <= 4
