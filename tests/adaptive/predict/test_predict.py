"""What a prediction says is what the allocator then sees."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributions, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from tenure import NewDisposeScope
from tenure.adaptive import AdaptiveUsageError, PredictionError, memory_budget, predict_peak
from tests.true_peak import counted_bytes, step_of, true_peak_bytes

from ..step.step_cases import squares
from ..unchanged import unchanged
from .networks import Physics, Recurrent, Residual, Tied, UNet, mlp, transformer


def exact(fn, batch, optimizer=None, *, trains=True, at_most=256):
    """The report of work that takes what was predicted, but for scalars that kernels make.

    Args:
        at_most: bytes that the prediction may be too high by, or, below 1, a share of them all.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    before = [p.detach().clone() for p in held]
    report = predict_peak(fn, batch, optimizer=optimizer)
    assert all(map(torch.equal, held, before))
    # what the program had cast before
    torch.clear_autocast_cache()
    work = step_of(fn, batch, optimizer) if trains else lambda: fn(batch)
    true_bytes = report.baseline_bytes + true_peak_bytes(work)
    assert 0 <= report.peak_bytes - true_bytes <= at_most * (true_bytes if at_most < 1 else 1)
    return report


REAL, WORDS = torch.randn, partial(torch.randint, 500)
MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)
STEPS = {
    "mlp": (mlp, REAL, (512, 64), None),
    "mlp, foreach": (mlp, REAL, (512, 64), partial(optim.Adam, foreach=True)),
    "mlp, one kernel": (mlp, REAL, (8, 64), partial(MOMENTUM, fused=True)),
    "transformer": (transformer, REAL, (8, 32, 64), optim.AdamW),
    "residual": (Residual, REAL, (1024, 64), MOMENTUM),
    "checkpointed": (partial(Residual, True), REAL, (1024, 64), optim.Adafactor),
}
WITHIN_2_PERCENT = {
    "u-net": (UNet, REAL, (8, 3, 32, 32), optim.AdamW),
    "gru": (Recurrent, REAL, (32, 20, 32), optim.AdamW),
    "tied": (Tied, WORDS, (16, 32), optim.AdamW),
    "physics": (Physics, REAL, (512, 2), optim.AdamW),
}


def training(name):
    """A loss, its batch, and the optimizer of its model."""
    make, made, shape, optimizer = (STEPS | WITHIN_2_PERCENT)[name]
    torch.manual_seed(0)
    model = make()
    return squares(model), made(shape), optimizer and optimizer(model.parameters())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_was_predicted(name):
    assert not exact(*training(name)).approximate


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN_2_PERCENT)
def test_a_prediction_is_not_too_low_and_within_two_percent(name):
    exact(*training(name), at_most=0.02)


@pytest.mark.parametrize("name", ["transformer", "mlp, foreach"])
def test_a_later_step_takes_what_was_predicted_before_the_first(name):
    fn, batch, stepped = training(name)
    report = predict_peak(fn, batch, optimizer=stepped)
    step_of(fn, batch, stepped)()
    stepped.zero_grad()
    state = [t for each in stepped.state.values() for t in each.values() if torch.is_tensor(t)]
    before = report.baseline_bytes + sum(t.nbytes for t in state)
    true_bytes = before + true_peak_bytes(step_of(fn, batch, stepped))
    assert 0 <= report.later_peak_bytes - true_bytes <= 512
    assert not report.fits(true_bytes - 1)


def test_torchs_own_tracker_finds_the_same_in_each_category():
    def made():
        model = mlp()
        return model, optim.Adam(model.parameters()), torch.randn(4, 64)

    model, optimizer, batch = made()
    said = predict_peak(squares(model), batch, optimizer=optimizer).categories
    with FakeTensorMode():
        model, optimizer, batch = made()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            step_of(squares(model), batch, optimizer)()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    found = {getattr(kind, "name", kind): n_bytes for kind, n_bytes in found.items()}
    names = {"PARAM": "parameters", "GRAD": "gradients", "ACT": "activations", "OTH": "inputs"}
    assert {key: found[key] for key in names} == {key: said[names[key]] for key in names}
    # it counts what the step makes and frees as state, and no numbers that kernels make
    in_step = said["optimizer state"] + said["temporaries"] - found["OPT"] - found["TEMP"]
    assert 0 <= in_step <= 64


def test_a_batch_larger_than_the_machine_is_predicted():
    report = predict_peak(squares(nn.Linear(1024, 1024)), torch.empty(2**25, 1024, device="meta"))
    assert report.peak_bytes > 3 * 2**37


def test_gradients_that_are_there_count_as_such_and_are_added_to():
    model, batch = mlp(), torch.randn(32, 64)
    squares(model)(batch).backward()
    held = sum(p.grad.nbytes for p in model.parameters())
    assert exact(squares(model), batch).categories["gradients"] == held


def test_the_place_is_that_of_the_forward_pass():
    wide = nn.Linear(16, 4096)
    report = predict_peak(lambda x: wide(x).exp().sum(), torch.randn(256, 16))
    assert report.phase == "backward"
    assert "test_predict.py" in report.place


def test_losses_of_other_kinds_are_run_backward():
    model, reached = nn.Linear(4, 4), []
    model.weight.register_hook(lambda gradient: reached.append(gradient.shape))
    for shown in (
        lambda loss: {"a": (loss, 3)},
        lambda loss: SimpleNamespace(loss=loss, logits=loss),
        lambda loss: loss.expand(3),
    ):
        predict_peak(lambda x, shown=shown: shown(F.relu(model(x)).sum()), torch.randn(8, 4))
    assert len(reached) == 3


# --- values that are known


def _written(lengths):
    counted = lengths.clone()
    counted += 1
    counted[0] = 100
    return torch.ones(int(counted.sum()), 8)


def _by_padding(ids):
    return torch.ones(512, len(ids)) if (ids == 0).any() else torch.ones(8)


_MASKED = {"x": torch.randn(64, 256), "mask": torch.arange(64) % 3 == 0}
_KNOWN = {
    # the kernel's own indices are taken to be as many as there can be
    "mask": (lambda b: b["x"][b["mask"]].exp(), _MASKED, 64 * 256 * 4),
    "masked_select": (lambda b: b["x"].masked_select(b["mask"][:, None]).exp(), _MASKED, 256),
    "nonzero": (lambda b: b["x"][b["mask"].nonzero()[:, 0]].exp(), _MASKED, 256),
    "no padding": (_by_padding, torch.arange(3, 259), 256),
    "padding": (_by_padding, torch.arange(256).clamp(min=0), 256),
    "length": (
        lambda n: torch.arange(int(n.max())).expand(3, -1) < n[:, None],
        torch.tensor([3, 70, 9]),
        256,
    ),
    "written": (_written, torch.tensor([1, 2, 3]), 256),
}


@pytest.mark.parametrize(("fn", "batch", "at_most"), _KNOWN.values(), ids=_KNOWN)
def test_values_of_the_batch_and_what_is_made_of_them_are_known(fn, batch, at_most):
    report = exact(fn, batch, trains=False, at_most=at_most)
    assert not any("taken to" in reason for reason in report.reasons)


def _counted(x):
    counted = torch.zeros(4, dtype=torch.int64)
    counted += (x > 0).sum(0)
    return torch.ones(10 + int(counted.sum()))


def _householder(x):
    return torch.linalg.householder_product(x, torch.ones(4)).sum()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x[x > 0].sum(), "a mask is taken to select everything"),
        (_counted, "a number is taken to be 1"),
        (_householder, "LinalgHouseholder.*works in another way"),
        (torch.max, "MaxBackward1.*works in another way"),
    ],
)
def test_what_is_not_known_is_told(fn, reason):
    report = predict_peak(fn, torch.randn(8, 4, requires_grad=True))
    assert report.approximate
    assert any(re.search(reason, each) for each in report.reasons)


def test_a_loop_that_ends_at_a_length_ends():
    def generate(x):
        is_running, length = torch.ones(2, dtype=torch.int64), 0
        while True:
            x, length = torch.cat([x, x[:, -1:]], 1), length + 1
            is_done = torch.full((2,), length >= 3) | (x[:, -1] > 5)
            is_running = is_running & ~is_done
            if is_running.max() == 0:
                return x

    batch = torch.zeros(2, 64)
    report = predict_peak(generate, batch)
    assert report.peak_bytes <= batch.nbytes * 4


# --- kernels


@pytest.mark.parametrize(
    ("fn", "shape", "at_most"),
    [
        (mlp(), (512, 64), 256),
        # a result of n - 4 pixels grows faster than n, and yet along a line
        (lambda x: F.conv2d(x, torch.ones(16, 3, 5, 5)).sum(), (4, 3, 224, 224), 0.01),
        # images of up to 64 pixels are resized by another kernel
        (lambda x: F.interpolate(x, (512, 512), mode="bilinear").sum(), (2, 21, 65, 65), 0.01),
        # memory that an operation enlarges in place
        (lambda x: torch.add(x, x, out=torch.empty(0)), (2**20,), 0),
    ],
    ids=["mlp", "convolution", "interpolation", "enlarged in place"],
)
def test_inference_takes_what_was_predicted(fn, shape, at_most):
    with torch.no_grad():
        assert not exact(fn, torch.ones(shape), trains=False, at_most=at_most).approximate


@pytest.mark.parametrize("shape", [(64, 16, 96, 96), (128, 8, 100, 100)])
def test_maps_of_no_more_than_127_pixels_are_measured(shape):
    net = nn.Sequential(nn.BatchNorm2d(shape[1]), nn.ReLU(), nn.MaxPool2d(2))
    report = predict_peak(lambda x: net(x).sum(), torch.ones(shape))
    assert report.reasons == ()
    assert not report.approximate


@pytest.mark.parametrize(
    "options",
    [{}, {"pos_weight": torch.rand(128), "reduction": "none"}],
    ids=["plain", "of classes, not reduced"],
)
def test_a_loss_that_works_in_place_is_predicted_so(options):
    weight, target = torch.ones(64, 128, requires_grad=True), torch.rand(64, 128)

    def fn(x):
        logits = x * weight
        return F.binary_cross_entropy_with_logits(logits, target, **options).square().sum()

    exact(fn, torch.randn(64, 128))


@pytest.mark.parametrize("part", [lambda x: x.max(-1).values, lambda x: x[torch.tensor([3, 1])]])
def test_a_gradient_of_a_part_takes_what_was_predicted_with_a_budget_and_without(part):
    weight, batch = torch.ones(64, 4096, requires_grad=True), torch.randn(64, 4096)

    def fn(x):
        return part(x + weight).sum()

    predicted = counted_bytes(fn, batch)
    with memory_budget("1GiB") as budget:
        step_of(fn, batch, None)()
    assert predicted == budget.peak_bytes
    weight.grad = None
    exact(fn, batch, at_most=0)


# --- around the work


def test_under_autocast_the_casts_count_and_the_model_comes_back():
    model, batch = mlp(), torch.randn(128, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch)
        # oneDNN's products of 16 bits are a bound, which shows in small ones
        exact(squares(model), batch, at_most=0.4)
    assert type(model[0].weight) is nn.Parameter


def test_inference_mode_takes_functions_apart():
    with torch.inference_mode():
        report = exact(transformer().eval(), torch.randn(8, 32, 64), trains=False, at_most=0.5)
    assert report.reasons == ("layers of attention run without their fast path",)
    x, peaks = torch.randn(8, 32, 64), []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            attention = lambda x: F.scaled_dot_product_attention(x, x, x)  # noqa: E731
            peaks.append(predict_peak(attention, x, device="cuda").peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_precision_that_was_set_for_all_backends_is_no_hindrance():
    with torch.backends.flags(fp32_precision="tf32"):
        assert predict_peak(lambda x: (x @ x).sum(), torch.ones(8, 8)).peak_bytes > 0


def test_an_optimizer_with_a_closure_runs_the_work_again():
    model, batch = mlp(), torch.randn(128, 64)
    optimizer = optim.LBFGS(model.parameters(), max_iter=2)
    report = predict_peak(squares(model), batch, optimizer=optimizer)
    assert report.peak_bytes > 4 * sum(p.nbytes for p in model.parameters())
    # how often it runs depends on values
    assert report.approximate
    assert not optimizer.state


def _elbo(hidden):
    mean, deviation = hidden.chunk(2, -1)
    found = distributions.Normal(mean, deviation.exp())
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return distributions.kl_divergence(found, prior).mean() - found.log_prob(found.rsample()).mean()


def _policy(hidden):
    found = distributions.Categorical(hidden.softmax(-1))
    return -found.log_prob(found.sample()).mean() - found.entropy().mean()


@pytest.mark.parametrize("loss_of", [_elbo, _policy])
def test_distributions_whose_arguments_are_checked_are_predicted(loss_of):
    model = mlp()
    assert not exact(lambda x: loss_of(model(x)), torch.randn(512, 64)).approximate


@pytest.mark.parametrize("around", [NewDisposeScope, lambda: torch.device("cpu")])
def test_arguments_of_distributions_are_valid_in_a_scope_and_with_a_default_device(around):
    def fn(x):
        with around():
            return distributions.Normal(x, x.exp()).sample().mean().item()

    predict_peak(fn, torch.randn(8))


# --- refused


def test_arguments_that_are_none_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(AdaptiveUsageError, match="wants a function"):
        predict_peak(3)
    with pytest.raises(AdaptiveUsageError, match="got a int as optimizer="):
        predict_peak(model, torch.ones(1, 2), optimizer=3)
    with pytest.raises(PredictionError, match="no shape yet"):
        predict_peak(nn.LazyLinear(2), torch.ones(1, 2))


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("fn", "batch", "message"),
    [
        (lambda net, x: net(x), torch.randn(4, 2).as_subclass(Marked), "is a Marked"),
        (lambda net, x: net(x), torch.randn(4, 2, requires_grad=True) * 2, "from before"),
        (lambda net, x: torch.from_numpy(x.numpy()), torch.ones(2), "reads values"),
        (
            lambda net, x: torch.repeat_interleave(x.long()),
            torch.ones(4),
            "repeat_interleave.*depends on values",
        ),
        (
            lambda net, x: net.double()(x.double()).sum(),
            torch.ones(2, 2),
            "it converts a module, .* Convert the module before",
        ),
    ],
)
def test_work_that_can_not_be_predicted_is_refused_and_the_model_is_as_before(fn, batch, message):
    net = nn.Linear(2, 2)
    with unchanged(net), pytest.raises(PredictionError, match=message):
        predict_peak(partial(fn, net), batch)
    assert type(net.weight) is nn.Parameter


def test_a_step_on_sparse_rows_is_refused_and_leaves_nothing():
    table, ids = nn.Embedding(20, 4, sparse=True), torch.randint(20, (8, 5))
    optimizer = optim.SparseAdam(table.parameters())
    refused = pytest.raises(PredictionError, match=r"a step of SparseAdam can't be predicted")
    with unchanged(table), refused:
        predict_peak(lambda x: table(x).sum(), ids, optimizer=optimizer)
    assert not optimizer.state
    assert predict_peak(lambda x: table(x).sum(), ids).peak_bytes > 0
