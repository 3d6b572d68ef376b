"""What ranks of gloo really take in a step of a model of transformers, and what is predicted."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

# private: the parts of `tenure fit`, of which a user sees the answer alone
from tenure._cli._fleet import answer as answer
from tenure._cli._fleet._configured import Configured as Configured
from tenure._cli._fleet._setup import Setup as Setup
from tenure._cli._fleet._setup import recipe as recipe
from tenure._cli._fleet._work import in_memory as in_memory
from tenure._cli._fleet._work import making as making
from tenure._cli._fleet._work import shard
from tenure._torch.fake_ranks import fake_ranks as fake_ranks
from tenure.adaptive import memory_budget
from tests.true_peak import counted_bytes, step_of, true_peak_bytes

pytest.importorskip("transformers")
# before ranks are forked; the model takes seconds, too
from transformers import CONFIG_MAPPING, LlamaForCausalLM  # noqa: F401


def measured(rank, setups):
    """The bytes of a step of each setup beyond what was there before."""
    asked = [Setup(**setup) for setup in setups]
    return [_replicated(each) if each.shard == "ddp" else _sharded(each) for each in asked]


def _sharded(asked):
    """The bytes of a first step beyond what was there before, as a budget counts them."""
    found = []
    mesh = init_device_mesh("cpu", (asked.ranks,))
    # a thread of gloo may hold what it has sent for a moment longer
    for _ in range(4):
        model, batch = in_memory(asked, Configured(asked), torch.device("cpu"))
        shard(model, mesh, offloads=asked.offloads)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = step_of(lambda batch, model=model: model(**batch).loss, batch, optimizer)
        with memory_budget("4GiB") as budget:
            step()
        found.append(budget.peak_bytes)
    return min(found)


def _replicated(asked):
    """The bytes of the second step, buckets included, as the allocator counts them."""

    def work(model, batch):
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = step_of(lambda batch: replica(**batch).loss, batch, optimizer)
        step()
        optimizer.zero_grad()
        return step()

    # a thread of gloo may hold what it has sent for a moment longer
    return min(
        true_peak_bytes(partial(work, *in_memory(asked, Configured(asked), torch.device("cpu"))))
        for _ in range(4)
    )


def predicted_sharded(setup, rank):
    found = Configured(setup)
    with making(setup, found, rank) as made:
        batch = found.batch(setup.batch, torch.device("meta"))
        return counted_bytes(made.fn, batch, made.optimizer)


TEXT = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip


def saved_config(folder, model_type="llama", **values):
    """A small model's configuration, in a folder of its own."""
    made = CONFIG_MAPPING[model_type](**values if "text_config" in values else TEXT | values)
    path = Path(folder, model_type)
    made.save_pretrained(path)
    return str(path)
