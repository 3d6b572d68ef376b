"""A function that writes parameters, such as a teacher that it moves, is not split."""

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, check_split, memory_budget, step


class Student(nn.Module):
    """Moves its teacher at each call."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = nn.Linear(8, 4).double(), how
        self.teacher = nn.Linear(8, 4).double().requires_grad_(False)

    @torch.no_grad()
    def move(self):
        pairs = list(zip(self.net.parameters(), self.teacher.parameters(), strict=True))
        for mine, its in pairs:
            if self.how == "other data":
                its.data = its.data * 0.9 + mine.data * 0.1
            elif self.how == "data in place":
                its.data.mul_(0.9).add_(mine.data, alpha=0.1)
            elif self.how == "copied":
                its.copy_(its * 0.9 + mine * 0.1)
        if self.how == "all at once":
            torch._foreach_lerp_([its for _, its in pairs], [mine for mine, _ in pairs], 0.1)

    def forward(self, x):
        self.move()
        return (self.net(x) - self.teacher(x)).square().mean()


WAYS = ["other data", "data in place", "copied", "all at once"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "ask",
    [
        lambda fn, x: step(fn, x, maximum=8),
        check_split,
    ],
)
def test_a_teacher_that_the_function_moves_is_named_and_left_where_it_is(how, ask):
    model = Student(how)
    before = model.teacher.weight.clone()
    named = r"'Student' writes the parameter Student\.teacher\.weight.*No gradient was delivered"
    with pytest.raises(AdaptiveUsageError, match=named):
        ask(model, torch.randn(24, 8).double())
    assert torch.equal(model.teacher.weight, before)
    assert model.net.weight.grad is None


@pytest.mark.parametrize("how", ["other data", "copied", "all at once"])
def test_it_is_named_without_verification_too(how):
    model = Student(how)
    with pytest.raises(AdaptiveUsageError, match=r"writes the parameter Student\.teacher\.weight"):
        step(model, torch.randn(24, 8).double(), maximum=8, verify=False)
    assert model.net.weight.grad is None


def test_it_is_named_by_the_first_trial():
    model, x = Student("copied"), torch.randn(2400, 8).double()
    with (
        pytest.raises(AdaptiveUsageError, match=r"writes the parameter"),
        memory_budget("100KiB"),
    ):
        step(model, x, verify=False)
    assert model.net.weight.grad is None


@pytest.mark.parametrize("how", WAYS)
def test_a_batch_that_fits_moves_the_teacher_once(how):
    model, plain = Student(how), Student(how)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(24, 8).double()
    plain(x).backward()
    step(model, x)
    assert torch.equal(model.teacher.weight, plain.teacher.weight)
    torch.testing.assert_close(model.net.weight.grad, plain.net.weight.grad)


def test_rows_that_a_table_renormalizes_are_no_write():
    table = nn.Embedding(10, 4, max_norm=0.5)
    net = nn.Sequential(table, nn.Linear(4, 1))
    step(lambda ids: net(ids).square().mean(), torch.arange(9), maximum=3)
    assert table.weight.grad is not None


def test_the_same_values_at_another_place_are_no_write():
    net = nn.Linear(4, 1)

    def loss(x):
        net.weight.data = net.weight.data.clone()
        return net(x).square().mean()

    step(loss, torch.randn(9, 4), maximum=3)
    assert net.weight.grad is not None
