"""What `step` refuses to split, and where it looks for it."""

import dataclasses
import functools
import threading
import types
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    NoBatchsizeCache,
    OutOfRetriesError,
    is_oom,
    step,
)

from ..attempt.failures import out_of_memory_above, out_of_memory_once
from ..unchanged import unchanged
from .step_cases import (
    OwnBatchNorm,
    compare,
    gradients,
    samples,
    small_net,
    squares,
    unseen,
    wanted_of,
    worst_error,
)


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(8), nn.LazyBatchNorm1d])
def test_batchnorm_in_training_is_refused_by_name_when_the_batch_has_to_be_split(norm):
    net = nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 1))
    name, check = type(net[1]).__name__, out_of_memory_above(4)
    with pytest.raises(
        BatchCoupledError,
        match=rf"The batch of 9 has to be split into micro-batches of 4, and net\.1 \({name}, "
        r"training with the statistics of its batch\) would give other results then\. Nothing was "
        r".*If they do not run, pass as model= what does\.$",
    ) as caught:
        step(lambda b: check(len(b)) or net(b).mean(), torch.randn(9, 4))
    assert caught.value.names == ("net.1",)
    assert not is_oom(caught.value)
    assert net[0].weight.grad is None
    # it may stay where the batch fits
    step(lambda b: net(b).mean(), torch.randn(4, 4))
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


class Queue(nn.Module):
    """Compares samples with those of before, as contrastive losses do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(16, 4))

    def forward(self, x):
        compared = x @ self.queue.clone().T
        self.queue[: len(x)] = x.detach()
        return compared


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(4), OwnBatchNorm()])
def test_per_chunk_accepts_statistics_and_no_queue_that_the_next_micro_batch_reads(norm):
    net, x = nn.Sequential(norm, nn.Linear(4, 4), Queue()), torch.randn(9, 4)
    message = r"read what the one before has written into .*net\.2\.queue\. Nothing was changed\. U"
    with unchanged(net), pytest.raises(BatchCoupledError, match=message):
        step(squares(net), x, maximum=4, batchnorm="per_chunk")
    step(squares(net[:2]), x, maximum=4, batchnorm="per_chunk")
    with pytest.raises(BatchCoupledError, match=r"a queue or a codebook, after step\(\)"):
        step(squares(net[2]), x, maximum=4)


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


@dataclasses.dataclass(slots=True)
class _Slot:
    net: nn.Module


REACHED = {
    "closure": (lambda n, _: lambda b: n(b), "n"),
    "global": (lambda n, s: _executed("def loss(b): return net(b)", net=n, len=s, spare=s), "net"),
    "partial": (lambda n, _: functools.partial(lambda m, b: m(b), n), "<lambda> argument 1"),
    "method": (lambda n, s: Trainer(n, s).loss, "self.net"),
    "lambda of self": (lambda n, s: (lambda t: lambda b: t.loss(b))(Trainer(n, s)), "self.net"),
    "slot": (lambda n, _: (lambda s: lambda b: s.net(b))(_Slot(n)), "s.net"),
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
        told = "^1 of the parameters have a hook from register_post_accumulate"
        with unchanged(net), pytest.raises(AdaptiveUsageError, match=told):
            step(squares(net), x, maximum=4)
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
    told = "uses a tensor, such as 'scale', that was computed"
    with pytest.raises(AdaptiveUsageError, match=told):
        step(lambda b: (net(b) * scale.exp()).mean(), x, maximum=4)

    def fn(b):
        loss = net(b).square().mean()
        loss.backward()
        return loss

    with pytest.raises(
        AdaptiveUsageError, match="or it runs backward itself, or once= uses what i"
    ):
        step(fn, x)

    def retaining(b):
        loss = net(b).square().mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(AdaptiveUsageError, match=r"calls backward\(\), which step\(\) does"):
        step(retaining, x, maximum=4)
    assert not gradients(net)
    with torch.no_grad(), pytest.raises(AdaptiveUsageError, match="with gradients enabled"):
        step(lambda b: net(b).mean(), x, maximum=4)
    assert net[0].weight.grad is None


# --- modules that no search finds are seen when they run


def _in_array(net):
    array = numpy.empty(1, dtype=object)
    array[0] = net
    return lambda b: array[0](b)


def _norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()


@pytest.mark.parametrize(
    ("hide", "maximum"),
    [
        (unseen, 4),
        (_in_array, 4),
        (unseen, 1),
        (lambda net: unseen(torch.compile(net, backend="eager")), 4),
    ],
)
def test_batchnorm_that_no_search_finds_is_refused_when_it_runs(hide, maximum):
    net = _norm()
    run = hide(net)
    x = samples(8)
    refused = pytest.raises(BatchCoupledError, match="BatchNorm1d, training with the statistics of")
    with unchanged(net), refused:
        step(squares(run), x, maximum=maximum)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_a_hidden_module_in_a_checkpoint_are_those_of_the_whole(fails, reentrant):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    run, n_calls, seen, x = unseen(net), [], [], samples(8)

    def fn(b):
        n_calls.append(len(b))
        # in an attempt whose first micro-batch has run backward
        if fails and n_calls[1:] == [4, 4]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out = checkpoint(run, b.clone().requires_grad_(), use_reentrant=reentrant)
        return out.square().sum(), out.numel()

    total, count = fn(x)
    net[0].weight.register_hook(seen.append)
    result = compare(net, total / count, fn, x, maximum=4, verify=not fails)
    assert (result.attempts > 1) == fails
    assert len(seen) == 2


class Counting(nn.Module):
    """Counts, writes a buffer, and draws by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.n_calls = 0
        self.register_buffer("calls", torch.zeros(()))
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.n_calls += 1
        self.calls = self.calls + 1
        out = self.linear(x)
        return out * torch.rand(out.shape, generator=self.random, dtype=out.dtype)


@pytest.mark.parametrize("way", ["outputs", "terms", "retry"])
def test_what_a_hidden_module_keeps_is_undone_in_both_passes_and_by_a_retry(way):
    net, x = Counting().double(), samples(8)
    run, fail = unseen(net), out_of_memory_once()
    out = torch.cat([net(chunk) for chunk in x.split(4)])
    wanted = wanted_of(net, out.std() if way == "outputs" else out.sum() / 8 + out.square().mean())
    later = torch.rand(1, generator=net.random)
    net.n_calls, net.calls = 0, torch.zeros(())
    net.random.manual_seed(3)

    def terms(b):
        out = run(b)
        if way == "retry":
            fail()
        return {"sum": (out.sum(), len(out)), "square": (out.square().sum(), out.numel())}

    fn, options = {
        "outputs": (run, {"loss": lambda out: out.std(), "maximum": 4}),
        # beside the one that is named
        "terms": (terms, {"model": nn.Linear(1, 1), "maximum": 4}),
        "retry": (terms, {"cache_type": NoBatchsizeCache}),
    }[way]
    assert step(fn, x, batchnorm="per_chunk", **options).sizes == (4, 4)
    assert worst_error(gradients(net), wanted) < 1e-10
    assert (net.n_calls, float(net.calls)) == (2, 2.0)
    assert torch.equal(torch.rand(1, generator=net.random), later)


def test_a_module_that_first_runs_in_a_later_micro_batch_is_refused():
    net, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    run, n_calls = unseen(norm), []

    def fn(b):
        n_calls.append(len(b))
        return (run(net(b)) if len(n_calls) > 1 else net(b)).square().mean()

    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(fn, samples(8), maximum=4)
    assert net.weight.grad is None
    assert norm.num_batches_tracked == 0
    with pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: norm(net(b)).square().mean(), samples(8), model=net, maximum=4)


def test_modules_that_other_threads_run_belong_to_no_step():
    net, other = nn.Linear(4, 4).double(), _norm()
    run = unseen(other)

    def fn(b):
        thread = threading.Thread(target=run, args=(samples(8),))
        thread.start()
        thread.join()
        return net(b).square().mean()

    assert step(fn, samples(8), maximum=4, verify=False).sizes == (4, 4)
    assert other[1].num_batches_tracked == 2


def test_a_proxy_of_a_model_stands_for_it():
    net, x = nn.Linear(4, 4).double(), samples(8)
    proxy = weakref.proxy(net)
    compare(net, squares(net)(x), lambda b: proxy(b).square().mean(), x, maximum=4, model=proxy)
    norm = _norm()
    hidden = weakref.proxy(norm)
    with pytest.raises(BatchCoupledError, match=r"hidden\.1 \(BatchNorm1d"):
        step(lambda b: hidden(b).square().mean(), x, maximum=4)
