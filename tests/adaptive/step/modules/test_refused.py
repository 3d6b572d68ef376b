"""What `step` refuses to split, and where it looks for it."""

import functools
import types

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, OutOfRetriesError, is_oom, step

from ...attempt.failures import out_of_memory_above
from ...unchanged import unchanged
from ..step_cases import OwnBatchNorm, samples, small_net, squares


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(8), nn.LazyBatchNorm1d])
def test_batchnorm_in_training_is_refused_by_name_when_the_batch_has_to_be_split(norm):
    net = nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 1))
    name, check = type(net[1]).__name__, out_of_memory_above(4)
    with pytest.raises(
        BatchCoupledError,
        match=rf"The batch of 9 has to be split into micro-batches of 4, and net\.1 \({name}, "
        r"training with the statistics of its batch\) would give other results then\. Nothing was",
    ) as caught:
        step(lambda b: check(len(b)) or net(b).mean(), torch.randn(9, 4))
    assert caught.value.names == ("net.1",)
    assert not is_oom(caught.value)
    assert net[0].weight.grad is None


def test_batchnorm_may_stay_when_the_batch_fits_or_it_is_frozen():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(9, 4)
    step(lambda b: net(b).mean(), x)
    assert net[1].num_batches_tracked == 1
    net[1].eval()
    step(lambda b: net(b).mean(), x, maximum=4)
    assert net[1].num_batches_tracked == 1


class Cached(nn.Module):
    """Has a buffer that grows, and is no statistic."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1))
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).float()
        return x * self.table * self.w


COUPLED = {
    r"net \(BatchNorm1d, without running statistics": lambda: nn.BatchNorm1d(
        4, track_running_stats=False
    ).eval(),
    "training its running statistics": lambda: nn.InstanceNorm1d(
        4, affine=True, track_running_stats=True
    ),
    r"net\.parametrizations\.weight\.0 \(_SpectralNorm, each call": lambda: (
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    ),
    r"net\.1 \(.*num_batches_tracked": lambda: torch.jit.script(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ),
    # without raising a version
    r"updates its buffer 'mean'": OwnBatchNorm,
    "": Cached,
}


@pytest.mark.parametrize("message", COUPLED)
def test_modules_that_normalize_with_the_batch_or_write_statistics_are_refused(message):
    net = COUPLED[message]()
    x = torch.randn(9, 4, 3) if isinstance(net, nn.InstanceNorm1d) else torch.randn(9, 4)
    if message:
        with unchanged(net), pytest.raises(BatchCoupledError, match=message):
            step(squares(net), x, maximum=4)
    if not isinstance(net, OwnBatchNorm) and "without" not in message:
        net.eval()
        assert step(squares(net), x, maximum=4).sizes == (4, 3, 2)


@pytest.mark.parametrize(
    ("norm", "n_samples", "maximum", "sizes"),
    [
        (nn.BatchNorm1d, 9, 4, (4, 3, 2)),
        (nn.BatchNorm1d, 4, 3, (2, 2)),
        (nn.BatchNorm1d, 7, 3, (3, 2, 2)),
        (nn.BatchNorm1d, 5, 2, (2, 3)),
        (nn.BatchNorm1d, 3, 2, (3,)),
        (nn.BatchNorm1d, 9, None, (9,)),
        (nn.LayerNorm, 3, 1, (1, 1, 1)),
        (nn.LayerNorm, 3, 2, (2, 1)),
    ],
)
def test_per_chunk_takes_the_partner_of_a_last_sample_from_the_micro_batch_before(
    norm, n_samples, maximum, sizes
):
    net, seen = nn.Sequential(nn.Linear(4, 8), norm(8)), []

    def fn(b):
        seen.append(len(b))
        return net(b).square().mean()

    x = torch.randn(n_samples, 4)
    result = step(fn, x, batchnorm="per_chunk", maximum=maximum, verify=False)
    assert (result.sizes, tuple(seen), result.micro_batch) == (sizes, sizes, max(sizes))
    assert norm is nn.LayerNorm or net[1].num_batches_tracked == len(sizes)


def test_per_chunk_gives_batchnorm_never_a_single_sample():
    net, check = nn.BatchNorm1d(4), out_of_memory_above(1)
    with pytest.raises(OutOfRetriesError, match="micro-batch 9, 4, 2"):
        step(lambda b: check(len(b)) or net(b).mean(), torch.randn(9, 4), batchnorm="per_chunk")


# --- where modules are found


class Trainer:
    """What users write: a method that runs a model and helpers of the object."""

    def __init__(self, net, spare):
        self.net = net
        self.spare = spare

    def loss(self, x):
        return self.forward(x).square().mean()

    def forward(self, x):
        return self.net(x)


def _executed(code, **space):
    exec(code, space)
    return space["loss"]


def _with_defaults(net):
    def fn(b, *, head=net):
        return head(b)

    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return functools.partial(wrapper, extra=None)


def _of_a_module(net, other):
    models = types.ModuleType("models")
    models.net, models.other = net, other
    return _executed("def loss(b): return models.net(b)", models=models)


class _Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


REACHED = {
    "closure": (lambda n, _: lambda b: n(b), "n"),
    "global": (lambda n, s: _executed("def loss(b): return net(b)", net=n, len=s, spare=s), "net"),
    "partial": (lambda n, _: functools.partial(lambda m, b: m(b), n), "<lambda> argument 1"),
    "method": (lambda n, s: Trainer(n, s).loss, "self.net"),
    "lambda of self": (lambda n, s: (lambda t: lambda b: t.loss(b))(Trainer(n, s)), "self.net"),
    "helper": (lambda n, _: (lambda f: lambda b: f(b))(lambda b: n(b)), "n"),
    "list": (lambda n, _: (lambda m: lambda b: m["a"][0](b))({"a": [n]}), "m['a'][0]"),
    "module": (lambda n, _: nn.Sequential(n, _Mean()), "Sequential.0"),
    "python module": (_of_a_module, "models.net"),
    "default": (lambda n, _: _with_defaults(n), "head"),
}


@pytest.mark.parametrize("how", REACHED)
def test_modules_are_found_before_they_run_and_others_are_not(how):
    make, name = REACHED[how]
    norm, spare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    with pytest.raises(BatchCoupledError) as caught:
        step(make(norm, spare), torch.randn(9, 4), maximum=4)
    assert caught.value.names == (name,)
    assert not norm.num_batches_tracked


def test_of_two_modules_of_one_name_neither_is_overlooked():
    coupled = Trainer(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), None)
    plain = Trainer(nn.Linear(4, 4), None)
    for fn in (
        lambda x: coupled.loss(x) + plain.loss(x),
        lambda x: plain.loss(x) + coupled.loss(x),
    ):
        with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
            step(fn, torch.randn(8, 4), maximum=4)


def test_modules_in_the_batch_and_in_model_are_found():
    norm = nn.BatchNorm1d(4)
    batch = {"x": torch.randn(9, 4), "net": norm}
    with pytest.raises(BatchCoupledError, match=r"batch\['net'\] \(BatchNorm1d"):
        step(lambda b: b["net"](b["x"]).mean(), batch, in_dims={"net": None}, maximum=4)
    hidden = [norm]

    class Opaque:
        __slots__ = ()

        def __call__(self, b):
            return next(iter(hidden))(b).square().mean()

    with pytest.raises(BatchCoupledError, match=r"model\[0\] \(BatchNorm1d"):
        step(Opaque(), torch.randn(9, 4), model=hidden, maximum=4)


# --- hooks, optimizers and graphs

STEPPED = r"SGD\.step\(\) was called inside step\(\)"


def test_a_hook_that_steps_inside_backward_is_refused_when_the_batch_is_split():
    net, x, steps = small_net(), samples(), []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    step(squares(net), x)
    assert len(steps) == 4
    with pytest.raises(
        AdaptiveUsageError, match="4 of the parameters have a hook from register_pos"
    ):
        step(squares(net), x, maximum=4)
    assert len(steps) == 4


@pytest.mark.simdevice
def test_an_optimizer_in_a_hook_is_refused_on_whatever_thread_it_runs(sim):
    for device in ("cpu", sim.device):
        net = small_net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net[0].weight.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
        before = net[0].weight.detach().clone()
        x = samples().to(device)
        with unchanged(net), pytest.raises(AdaptiveUsageError, match=STEPPED):
            step(squares(net), x)
        net(x).mean().backward()  # the hook may step anywhere else
        assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize("maximum", [9, 4])
def test_an_optimizer_inside_the_function_is_refused(maximum):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def fn(b):
        loss = net(b).square().mean()
        optimizer.step()
        return loss

    x = samples()
    with unchanged(net), pytest.raises(AdaptiveUsageError, match=STEPPED):
        step(fn, x, maximum=maximum)
    optimizer.step()


def test_graphs_that_are_not_the_steps_are_refused_by_name():
    net, x = small_net(), samples()
    scale = net[0].weight.exp().sum()
    with pytest.raises(
        AdaptiveUsageError, match="uses a tensor, such as 'scale', that was computed"
    ):
        step(lambda b: (net(b) * scale.exp()).mean(), x, maximum=4)

    def fn(b):
        loss = net(b).square().mean()
        loss.backward()
        return loss

    with pytest.raises(AdaptiveUsageError, match="or it runs backward itself"):
        step(fn, x)
    with torch.no_grad(), pytest.raises(AdaptiveUsageError, match="with gradients enabled"):
        step(lambda b: net(b).mean(), x, maximum=4)
    assert net[0].weight.grad is None
