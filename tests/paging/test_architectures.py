"""Architectures of transformers train in the least room as they do whole, bit for bit.

Here are a few; `python -m benchmarks.sweep_paging` runs all of them.
"""

import pytest
import torch

from benchmarks._corpus_transformers import architectures
from benchmarks._paged_cycles import Cycles, call_of, with_eager_experts

pytestmark = [
    # about values, which no allocator changes: once, with the one that has more rules
    pytest.mark.sim_allocator("cuda"),
    pytest.mark.slow,
    # Their configurations warn of sizes that no model in use has.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("made", architectures()[::48], ids=lambda made: made.name)
def test_it_trains_as_it_does_whole(sim, made):
    torch.manual_seed(0)
    step = made.build(made.sizes[0])
    with_eager_experts(step.model)
    assert Cycles(sim, step.model, trains=True).differences([call_of(step, made.family)]) == []
