"""What a pass asks about its pages grows with its units, and no faster."""

import sys

import pytest
import torch
from torch import nn

from tenure.paging import page, plan_paging
from tenure.paging._device._page import Page

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def questions(monkeypatch):
    """The pages that were asked whether they are held."""
    asked = []
    is_held = Page.is_held

    def counted(page):
        asked.append(page)
        return is_held(page)

    monkeypatch.setattr(Page, "is_held", counted)
    return asked


def questions_of_a_pass(asked, n_units, folder):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(n_units)]).eval()
    x = torch.randn(1, 16)
    with page(model, "cpu", 1, budget=n_units * 1536 // 2, host=folder):
        for _ in range(3):
            asked.clear()
            model(x)
        return len(asked)


def test_a_page_is_asked_a_few_times_a_pass_whether_it_is_held(questions, tmp_path):
    for n_units in (25, 50, 100, 200):
        assert 0 < questions_of_a_pass(questions, n_units, tmp_path) < 3 * n_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

    def forward(self, x):
        return x + sum(layer(self.norm(x)) for layer in self.layers)


def lines_of_a_pass(n_blocks, share, folder, training):
    """How many lines of Python a pass runs on this thread: a clock would tell what else runs."""
    model = nn.Sequential(*[Block() for _ in range(n_blocks)]).train(training)
    x = torch.randn(2, 4)
    n_bytes = plan_paging(model, "cpu", budget="1GiB", host=folder).weight_bytes
    n_lines = 0

    def count(frame, event, argument):
        nonlocal n_lines
        n_lines += 1
        return count

    with page(model, "cpu", budget=int(n_bytes * share), host=folder):
        for _ in range(2):
            model(x)
        before = sys.gettrace()
        sys.settrace(count)
        try:
            model(x)
        finally:
            sys.settrace(before)
    return n_lines


@pytest.mark.parametrize(("share", "training"), [(2, True), (0.6, False)])
def test_a_pass_over_four_times_as_many_modules_runs_four_times_as_many_lines(
    tmp_path, share, training
):
    few, many = (lines_of_a_pass(n_blocks, share, tmp_path, training) for n_blocks in (5, 20))
    assert many <= 4.6 * few
