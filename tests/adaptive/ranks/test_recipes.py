"""The loop that the page on ranks tells to write, on ranks with different numbers of batches."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ..step.step_cases import worst_error
from .launch import run_ranks

_PAGE = Path(__file__).parents[3] / "docs" / "ranks.md"
pytestmark = pytest.mark.skipif(not _PAGE.exists(), reason="runs where the docs are")
# batches, and the samples of each
BATCHES = ((4, 3, 5), (6,), (2, 2))


def names_of_the_page():
    """What the page defines, of the examples before the first that prints."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", _PAGE.read_text("utf-8"), re.DOTALL)[:2]:
        exec(block, names)
    return names


def samples_of(rank):
    torch.manual_seed(rank)
    return [
        {"x": torch.randn(n, 4).double(), "y": torch.randn(n, 1).double()} for n in BATCHES[rank]
    ]


def trained_on(rank):
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1).double()
    names_of_the_page()["train"](rank, net, samples_of(rank))
    return {name: value.tolist() for name, value in net.state_dict().items()}


def test_the_loop_trains_as_one_process_with_all_samples():
    found = run_ranks(trained_on, 3)
    assert found[0] == found[1] == found[2]
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1).double()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [samples_of(rank) for rank in range(3)]
    for i in range(3):
        there = [each[i] for each in batches if i < len(each)]
        x, y = (torch.cat([each[key] for each in there]) for key in "xy")
        sgd.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        sgd.step()
    got = {name: torch.tensor(value, dtype=torch.float64) for name, value in found[0].items()}
    assert worst_error(got, dict(net.state_dict())) < 1e-10


def alone_on(rank):
    net = torch.nn.Linear(4, 1).double()
    names_of_the_page()["train"](rank, net, samples_of(rank))
    return dist.get_world_size()


def test_the_loop_runs_on_one_rank_too():
    assert run_ranks(alone_on, 1) == [1]
