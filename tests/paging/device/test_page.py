"""What a pass asks about its pages grows with its units, and no faster."""

import pytest
import torch
from torch import nn

from tenure.paging import page
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
