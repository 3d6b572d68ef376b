"""The modes below which a step is verified: constant random numbers, and worse rounding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import SplitMismatchError, step
from tenure.adaptive._step._verify._compare import GRADIENTS
from tenure.adaptive._step._verify._modes import ConstantNumbers, RoughRounding


def test_dropout_and_noise_are_constant_and_permutations_reversals():
    with ConstantNumbers():
        assert torch.equal(F.dropout(torch.ones(4), 0.5), torch.ones(4))
        assert torch.randn(3).unique().numel() == 1
        assert torch.randperm(3)[0] == 2


def test_a_product_changes_by_no_more_than_rounding_may():
    x = torch.arange(1.0, 5.0).reshape(2, 2) / 3
    with RoughRounding():
        rough = x @ x
    assert not torch.equal(rough, x @ x)
    assert torch.allclose(rough, x @ x, rtol=1e-6)


DRAWS = {
    "rand": torch.rand,
    "randn": torch.randn,
    "randint": lambda n: torch.randint(5, (n,)),
    "randint between": lambda n: torch.randint(3, 9, (n,)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, dtype=torch.float64)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n), 7),
    "normal": lambda n: torch.normal(torch.zeros(n), 1.0),
    "normal of means and deviations": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "normal of a size": lambda n: torch.normal(0.0, 2.0, (n,)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(0.3),
    "normal_": lambda n: torch.empty(n).normal_(),
    "log_normal_": lambda n: torch.empty(n).log_normal_(),
    "uniform_": lambda n: torch.empty(n).uniform_(-1, 1),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "cauchy_": lambda n: torch.empty(n).cauchy_(),
    "geometric_": lambda n: torch.empty(n).geometric_(0.5),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(4),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 4), 2),
    "multinomial again": lambda n: torch.multinomial(torch.ones(n, 4), 2, replacement=True),
    "poisson": lambda n: torch.poisson(torch.ones(n)),
    "dropout": lambda n: F.dropout(torch.ones(n), 0.4),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n), 0.4, True),
    "one number for all": lambda n: torch.rand(()).expand(n),
    "a generator's": lambda n: torch.rand(n, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_sample_gets_the_same_number_whatever_their_count(name):
    def drawn(n):
        torch.manual_seed(3)
        with ConstantNumbers() as numbers:
            values = DRAWS[name](n)
            following = torch.rand(1)
        assert not numbers.has_unknown
        return values, following

    few, many = drawn(3), drawn(50)
    assert few[0].dtype == many[0].dtype == DRAWS[name](3).dtype
    assert torch.equal(few[1], many[1])
    assert torch.equal(many[0][:3], few[0])
    assert torch.equal(few[0][0], few[0][2])


def test_permutations_are_reversals():
    with ConstantNumbers():
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]


def test_operations_that_draw_nothing_are_told_from_those_that_do():
    x = torch.ones(1, 2, 4)
    for rate in (0.0, 0.5):
        with ConstantNumbers() as numbers:
            F.scaled_dot_product_attention(x, x, x, dropout_p=rate)
        assert numbers.has_drawn is (rate > 0)


def test_what_is_not_known_is_told():
    with ConstantNumbers() as numbers:
        torch.binomial(torch.full((3,), 4.0), torch.full((3,), 0.5))
    assert numbers.has_unknown


def test_worse_rounding_leaves_random_numbers_and_weights_alone():
    weight = torch.randn(4, 4, requires_grad=True)
    before, state = weight.detach().clone(), torch.get_rng_state()
    with RoughRounding():
        result = (weight.t() @ weight).tanh()
        result.sum().backward()
    assert torch.equal(weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    exact = (weight.t() @ weight).tanh()
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(result, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_worse_rounding_keeps_positions_and_what_is_finite(dtype):
    mask = torch.ones(64, dtype=dtype)
    x = torch.linspace(0.1, 0.9, 64, dtype=dtype)
    positions, third = mask.cumsum(0), x / 3
    with RoughRounding():
        assert torch.equal(mask.cumsum(0), positions)
        assert ((2 - mask) * torch.finfo(dtype).min).isfinite().all()
        assert not torch.equal(x / 3, third)


def test_types_that_no_result_shows_are_seen():
    weight, seen = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), set()
    with ConstantNumbers(seen):
        weight.sum(1, dtype=torch.float32).double().sum().backward()
    assert seen == {torch.float32, torch.float64}
    assert GRADIENTS.of([weight], seen) == GRADIENTS.float32
    seen.clear()
    with ConstantNumbers(seen), torch.autocast("cpu", torch.bfloat16):
        (weight.detach().float() @ weight.detach().float()).float().tanh()
    assert seen == {torch.bfloat16, torch.float32}
    assert GRADIENTS.of([weight], seen) == GRADIENTS.coarser
    seen.clear()
    # nothing is rounded to what is only looked up or carried
    with ConstantNumbers(seen):
        torch.where(weight.detach() > 0, torch.zeros(4, 4).half().clone(), 1)
    assert not seen


def _in_float64(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    return net, {"x": x, "y": torch.randint(5, (8,))}


def _entropy(net, batch):
    """In float32, as the losses of transformers are whatever the type of the model."""
    return F.cross_entropy(net(batch["x"]).float(), batch["y"])


_ROUNDED = {
    "the loss": (_entropy, {}),
    "a loss that is wide again": (lambda net, batch: _entropy(net, batch).double(), {}),
    "one of two terms": (
        lambda net, b: {"entropy": _entropy(net, b), "norm": net(b["x"]).square().mean()},
        {},
    ),
    "what a root is taken of": (_entropy, {"then": lambda value: value.double().sqrt()}),
    "outputs": (lambda net, batch: net(batch["x"]).float(), {"loss": lambda out: out.std()}),
}


@pytest.mark.parametrize("seed", [1, 6, 7])
@pytest.mark.parametrize("what", _ROUNDED)
def test_a_loss_that_is_rounded_on_the_way_is_right(what, seed):
    fn, options = _ROUNDED[what]
    net, batch = _in_float64(seed)
    assert step(lambda b: fn(net, b), batch, maximum=3, **options).sizes == (3, 3, 2)


@pytest.mark.parametrize("what", ["the loss", "a loss that is wide again", "one of two terms"])
def test_a_loss_that_is_rounded_on_the_way_hides_no_mismatch(what):
    fn, _ = _ROUNDED[what]
    net, batch = _in_float64(1)
    batch["y"][:3] = -100
    with pytest.raises(SplitMismatchError, match="would give other results then"):
        step(lambda b: fn(net, b), batch, maximum=3)
