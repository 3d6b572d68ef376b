"""What a step has to find to be exact, and takes back: generators, caches, writes of parameters."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from tenure.adaptive import (
    AdaptiveUsageError,
    NoBatchsizeCache,
    check_split,
    find_batch_size,
    memory_budget,
    predict_peak,
    step,
)
from tests.programs import run_program

from ..unchanged import unchanged
from .step_cases import gradients, wanted_of

# --- generators of the user's own

KINDS = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy of before": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}
generator = None


def _draw(n):
    if isinstance(generator, torch.Generator):
        return torch.rand(n, generator=generator, dtype=torch.float64)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.random() for _ in range(n)], dtype=torch.float64)
    is_old = isinstance(generator, np.random.RandomState)
    return torch.from_numpy(generator.random_sample(n) if is_old else generator.random(n))


class Encoder(nn.Module):
    """Masks at random, by a generator that only its file names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4).double()

    def forward(self, x):
        return self.linear(x * _draw(len(x))[:, None])


def _contrast(out):
    out = nn.functional.normalize(out, dim=1)
    return nn.functional.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))


@pytest.fixture
def encoder():
    global generator
    torch.manual_seed(0)
    yield Encoder()
    generator = None


@pytest.mark.parametrize(
    ("kind", "where"),
    [*[(kind, "global") for kind in KINDS], ("numpy", "attribute"), ("python", "captured")],
)
def test_both_passes_of_a_loss_of_outputs_draw_the_same(encoder, kind, where):
    global generator
    make = KINDS[kind]
    generator, captured, encoder.random = make(), make(), make()

    def forward(x):
        global generator
        # as if the code named it there, and nowhere else
        generator = {"global": generator, "attribute": encoder.random, "captured": captured}[where]
        return encoder(x)

    x = torch.randn(30, 8, dtype=torch.float64)
    whole = _contrast(torch.cat([forward(part) for part in x.split(10)]))
    expected, after = wanted_of(encoder, whole), _draw(3)
    generator, captured, encoder.random = make(), make(), make()
    step(forward, x, loss=_contrast, maximum=10)
    torch.testing.assert_close(gradients(encoder), expected)
    assert torch.equal(_draw(3), after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_leaves_the_generator_as_it_was(encoder, kind):
    global generator
    x = torch.randn(8, 8, dtype=torch.float64)
    generator = KINDS[kind]()
    expected = _draw(3)
    generator = KINDS[kind]()
    check_split(lambda b: encoder(b).sum(1).mean(), x)
    find_batch_size(lambda n: encoder(x[:n]).sum().backward(), high=4)
    if kind == "torch":  # NumPy's numbers have no fakes
        predict_peak(encoder, x)
    assert torch.equal(_draw(3), expected)


@pytest.mark.slow
def test_random_numbers_of_numpy_are_noted_before_it_is_asked_for_the_first():
    program = """
import torch, numpy
from tenure.adaptive import step
drawn, net = [], torch.nn.Linear(1, 1)
def fn(x):
    drawn.append(float(numpy.random.rand()))
    return net(x)
step(fn, torch.ones(4, 1), loss=lambda out: out.sum(), maximum=2, verify=False)
print(drawn[:2] == drawn[2:], len(drawn))
"""
    done = run_program(program, has_tenure=False)
    assert (done.stdout, done.stderr) == ("True 4\n", "")


# --- caches: what a model keeps while it is only asked about is no disposed tensor afterwards

MASKS = {}


def in_dict(n):
    if n not in MASKS:
        MASKS[n] = torch.ones(n, n).tril()
    return MASKS[n]


def _asked_of_a_split(loss_of):
    assert check_split(loss_of, torch.randn(40, 8)).ok


def _asked_for_a_size(loss_of):
    x = torch.randn(40, 8)
    assert find_batch_size(lambda n: loss_of(x[:n]).backward(), high=40, budget="100KiB") == 40


def _tried(loss_of):
    x = torch.randn(4000, 8)
    with memory_budget("100KiB"):
        assert step(loss_of, x, cache_type=NoBatchsizeCache).attempts > 1


@pytest.mark.parametrize("ask", [_asked_of_a_split, _asked_for_a_size, _tried])
@pytest.mark.parametrize("where", ["in_dict", "remembered"])
def test_the_model_trains_after_it_was_asked_about(where, ask):
    MASKS.clear()
    net, mask = nn.Linear(8, 8), in_dict
    if where == "remembered":
        mask = functools.lru_cache(lambda n: torch.ones(n, n).tril())

    def loss_of(x):
        return (net(x) @ mask(8)).square().mean()

    ask(loss_of)
    loss_of(torch.randn(40, 8)).backward()


def test_a_cache_that_a_comparison_filled_is_told():
    net, held = nn.Linear(8, 3), {}

    def cached(b):
        goal = held.setdefault("goal", torch.zeros(4, 3))
        return nn.functional.mse_loss(net(b), goal.copy_(b[:, :3]))

    with pytest.warns(UserWarning, match="could not verify"):
        step(cached, torch.randn(16, 8), maximum=4)
    assert step(cached, torch.randn(16, 8), maximum=4, verify=False).sizes == (4, 4, 4, 4)


# --- a function that writes parameters, such as a teacher that it moves


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


@pytest.mark.parametrize("how", ["other data", "data in place", "copied", "all at once"])
def test_a_teacher_that_the_function_moves_is_named_and_left_where_it_is(how):
    model, x = Student(how), torch.randn(24, 8).double()
    refused = functools.partial(
        pytest.raises,
        AdaptiveUsageError,
        match=r"'Student' writes the parameter Student\.teacher\.weight.*No gradient was delivered",
    )
    for ask in (functools.partial(step, maximum=8), check_split):
        with unchanged(model), refused():
            ask(model, x)
    if how != "data in place":
        with refused():
            step(model, x, maximum=8, verify=False)
    # named by the first trial, too
    if how == "copied":
        many = torch.randn(2400, 8).double()
        with refused(), memory_budget("100KiB"):
            step(model, many, verify=False)
    assert model.net.weight.grad is None
    # a batch that fits moves it once
    model, plain = Student(how), Student(how)
    plain.load_state_dict(model.state_dict())
    plain(x).backward()
    step(model, x)
    assert torch.equal(model.teacher.weight, plain.teacher.weight)
    torch.testing.assert_close(model.net.weight.grad, plain.net.weight.grad)


def test_a_parameter_of_no_module_that_the_function_moves_is_named_and_left():
    net, centers = nn.Linear(8, 8).double(), nn.Parameter(torch.zeros(8).double())

    def loss_of(b):
        out = net(b)
        centers.data.add_(out.detach().mean(0) - centers.data, alpha=0.1)
        return (out - centers).square().mean()

    with pytest.raises(AdaptiveUsageError, match="'loss_of' writes the parameter centers"):
        step(loss_of, torch.randn(24, 8).double(), maximum=8)
    assert not centers.any()


def test_the_same_values_and_rows_that_a_table_renormalizes_are_no_write():
    net = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 1))

    def loss(ids):
        net[1].weight.data = net[1].weight.data.clone()
        return net(ids).square().mean()

    step(loss, torch.arange(9), maximum=3)
    assert net[0].weight.grad is not None
