"""What `step` refuses to split, and where it looks for it."""

import _thread
import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    OutOfRetriesError,
    find_batch_size,
    is_oom,
    step,
)

from ...attempt.failures import out_of_memory_above
from ..step_cases import samples, small_net


class Trainer:
    """What users write: a method that runs a model and helpers of the object."""

    def __init__(self, net, spare):
        self.net = net
        self.spare = spare

    def loss(self, x):
        return self.forward(x).square().mean()

    def forward(self, x):
        return self.net(x)


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(8),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("norm", NORMS)
def test_batchnorm_in_training_is_refused_by_name_when_the_batch_has_to_be_split(norm):
    net = nn.Sequential(nn.Linear(4, 8), NORMS[norm](), nn.Linear(8, 1))
    check = out_of_memory_above(4)

    def fn(b):
        check(len(b))
        return net(b).mean()

    with pytest.raises(
        BatchCoupledError,
        match=rf"The batch of 9 has to be split into micro-batches of 4, and net\.1 \({norm}, "
        r"training with the statistics of its batch\) would give other results then\. Nothing was",
    ) as caught:
        step(fn, torch.randn(9, 4))
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


def test_batchnorm_without_statistics_and_instance_norm_with_them_are_refused():
    bare = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(BatchCoupledError, match=r"bare \(BatchNorm1d, without running statistics"):
        step(lambda b: bare(b).square().mean(), torch.randn(9, 4), maximum=4)
    tracked = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    with pytest.raises(BatchCoupledError, match="training its running statistics"):
        step(lambda b: tracked(b).square().mean(), torch.randn(9, 4, 3), maximum=4)
    plain = nn.InstanceNorm1d(4, affine=True)
    step(lambda b: plain(b).square().mean(), torch.randn(9, 4, 3), maximum=4)


def test_a_module_that_writes_a_buffer_in_each_call_is_refused():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    with pytest.raises(
        BatchCoupledError, match=r"normed\.parametrizations\.weight\.0 \(_SpectralNorm, each call"
    ):
        step(lambda b: normed(b).mean(), torch.randn(9, 4), maximum=4)
    normed.eval()
    step(lambda b: normed(b).mean(), torch.randn(9, 4), maximum=4)


def test_scripted_modules_are_split_and_their_batchnorm_refused():
    net = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    with pytest.raises(BatchCoupledError, match=r"net\.1 \(.*num_batches_tracked"):
        step(lambda b: net(b).mean(), torch.randn(9, 4), maximum=4)
    assert net.state_dict()["1.num_batches_tracked"] == 0
    assert step(lambda b: net.eval()(b).mean(), torch.randn(9, 4), maximum=4).sizes == (4, 3, 2)


def test_a_buffer_that_grows_is_a_cache_and_no_statistic():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(1))
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if len(self.table) < x.shape[1]:
                self.table = torch.arange(x.shape[1]).float()
            return x * self.table * self.w

    net = Cached()
    assert step(lambda b: net(b).mean(), torch.randn(9, 4), maximum=4).sizes == (4, 3, 2)


def test_per_chunk_lets_batchnorm_see_micro_batches_and_never_a_single_sample():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(9, 4)
    sizes = []

    def fn(b):
        sizes.append(len(b))
        return net(b).mean()

    result = step(fn, x, batchnorm="per_chunk", maximum=4, verify=False)
    assert (result.sizes, sizes) == ((4, 3, 2), [4, 3, 2])
    assert (result.micro_batch, net[1].num_batches_tracked) == (4, 3)
    check = out_of_memory_above(1)

    def never(b):
        check(len(b))
        return net(b).mean()

    with pytest.raises(OutOfRetriesError, match="micro-batch 9, 4, 2"):
        step(never, x, batchnorm="per_chunk")


@pytest.mark.parametrize(
    ("n_samples", "maximum", "sizes"),
    [(4, 3, (2, 2)), (7, 3, (3, 2, 2)), (5, 2, (2, 3)), (3, 2, (3,)), (1, None, (1,))],
)
def test_per_chunk_takes_the_partner_of_a_last_sample_from_the_micro_batch_before(
    n_samples, maximum, sizes
):
    norm = nn.BatchNorm2d(4)
    x = torch.randn(n_samples, 4, 3, 3)
    result = step(lambda b: norm(b).square().mean(), x, batchnorm="per_chunk", maximum=maximum)
    assert (result.sizes, result.micro_batch) == (sizes, max(sizes))


@pytest.mark.parametrize(("maximum", "sizes"), [(1, (1, 1, 1)), (2, (2, 1))])
def test_per_chunk_keeps_the_maximum_where_no_module_needs_two_samples(maximum, sizes):
    net = small_net()
    result = step(lambda b: net(b).mean(), samples(3), batchnorm="per_chunk", maximum=maximum)
    assert (result.sizes, result.micro_batch) == (sizes, maximum)


class _Slotted:
    __slots__ = ("net", "unset")

    def __init__(self, net):
        self.net = net

    def loss(self, b):
        return self.net(b) + self.unset


class _Properties:
    def __init__(self, net):
        self._net = net

    @property
    def net(self):
        return self.cached

    @functools.cached_property
    def cached(self):
        return self._net

    def loss(self, b):
        return self.net(b)


def _of_class(net):
    class OfClass:
        model, other = net, nn.BatchNorm1d(1)

        @classmethod
        def by_class(cls, b):
            return cls.model(b)

        @staticmethod
        def by_name(b):
            return OfClass.model(b)

        def by_object(self, b):
            return self.model(b)

    return OfClass


def _executed(code, **space):
    exec(code, space)
    return space["loss"]


def _python_module(**space):
    module = types.ModuleType("models")
    vars(module).update(space)
    return module


def _with_defaults(net, extra=None):
    def fn(b, *, head=net):
        return head(b)

    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return functools.partial(wrapper, extra=extra)


def _in_a_loop(net):
    loop = []
    loop.append(loop)

    def fn(b):
        return later(loop, fn, net, b)

    return fn

    def later(*_):
        return None


REACHED = {
    "closure": (lambda n, _: lambda b: n(b), "n"),
    "global": (lambda n, s: _executed("def loss(b): return net(b)", net=n, len=s, spare=s), "net"),
    "partial": (lambda n, _: functools.partial(lambda m, b: m(b), n), "<lambda> argument 1"),
    "method": (lambda n, s: Trainer(n, s).loss, "self.net"),
    "lambda of self": (lambda n, s: (lambda t: lambda b: t.loss(b))(Trainer(n, s)), "self.net"),
    "helper": (lambda n, _: (lambda f: lambda b: f(b))(lambda b: n(b)), "n"),
    "list": (lambda n, _: (lambda m: lambda b: m["a"][0](b))({"a": [n]}), "m['a'][0]"),
    "module": (lambda n, _: nn.Sequential(n, _Mean()), "Sequential.0"),
    "python module": (
        lambda n, s: _executed(
            "def loss(b): return models.net(b)", models=_python_module(net=n, other=s)
        ),
        "models.net",
    ),
    "default": (lambda n, _: _with_defaults(n), "head"),
    "slot": (lambda n, _: _Slotted(n).loss, "self.net"),
    "properties": (lambda n, _: _Properties(n).loss, "self._net"),
    "class method": (lambda n, _: _of_class(n).by_class, "self.model"),
    "static method": (lambda n, _: _of_class(n).by_name, "OfClass.model"),
    "class attribute": (lambda n, _: _of_class(n)().by_object, "self.model"),
    "cache": (lambda n, _: (lambda get: lambda b: get()(b))(functools.cache(lambda: n)), "n"),
    "weak reference": (lambda n, _: (lambda ref: lambda b: ref()(b))(weakref.ref(n)), "ref"),
    "cycle": (lambda n, _: _in_a_loop(n), "net"),
}


@pytest.mark.parametrize("how", REACHED)
def test_modules_are_found_before_they_run_and_others_are_not(how):
    make, name = REACHED[how]
    norm, spare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    with pytest.raises(BatchCoupledError) as caught:
        step(make(norm, spare), torch.randn(9, 4), maximum=4)
    assert caught.value.names == (name,)
    assert not norm.num_batches_tracked


def test_a_variable_of_the_same_name_as_an_attribute_is_not_reached():
    class Batch(dict):
        __getattr__ = dict.get

    net, spare = small_net(), nn.BatchNorm1d(4)
    fn = _executed("def loss(b): return b.model(b.x).mean()", model=spare)
    batch = Batch(x=samples(), model=net)
    assert len(step(fn, batch, in_dims={"model": None}, maximum=4).sizes) == 3


class _Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


def test_model_names_the_modules_that_no_search_finds():
    hidden = [nn.BatchNorm1d(4)]

    class Opaque:
        __slots__ = ()

        def __call__(self, b):
            return next(iter(hidden))(b).square().mean()

    with pytest.raises(BatchCoupledError, match=r"model\[0\] \(BatchNorm1d"):
        step(Opaque(), torch.randn(9, 4), model=hidden, maximum=4)


def test_a_hook_that_steps_inside_backward_is_refused_when_the_batch_is_split():
    net, x = small_net(), samples()
    steps = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    step(lambda b: net(b).square().mean(), x)
    assert len(steps) == 4
    with pytest.raises(
        AdaptiveUsageError, match="4 of the parameters have a hook from register_pos"
    ):
        step(lambda b: net(b).square().mean(), x, maximum=4)
    assert len(steps) == 4


@pytest.mark.simdevice
def test_an_optimizer_in_a_hook_is_refused_on_whatever_thread_it_runs(sim):
    for device in ("cpu", sim.device):
        net = small_net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net[0].weight.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
        before = net[0].weight.detach().clone()
        with pytest.raises(AdaptiveUsageError, match=r"SGD\.step\(\) was called inside step\(\)"):
            step(lambda b, net=net: net(b).square().mean(), samples().to(device))
        assert torch.equal(net[0].weight, before)
        assert net[0].weight.grad is None
        net(samples().to(device)).mean().backward()  # the hook may step anywhere else
        assert not torch.equal(net[0].weight, before)


def test_the_outer_block_holds_again_after_one_within_on_threads_of_autograd():
    net, x = small_net(), samples()
    seen = []

    def on_a_thread_of_autograd(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for each in parameters:
            each.grad = torch.ones_like(each)
        done = threading.Event()

        def run():
            try:
                seen.append(optimizer.step())
            except AdaptiveUsageError as error:
                seen.append(str(error))
            done.set()

        # Python knows nothing of it, as of threads of C++
        _thread.start_new_thread(run, ())
        assert done.wait(60)

    def fn(n):
        step(lambda b: net(b).square().mean(), x[:n])
        on_a_thread_of_autograd([nn.Parameter(torch.ones(1))])
        on_a_thread_of_autograd(list(net.parameters()))

    find_batch_size(fn, low=2, high=2)
    assert seen[0] is None
    assert "was called inside find_batch_size()" in seen[1]


@pytest.mark.parametrize("maximum", [9, 4])
def test_an_optimizer_inside_the_function_is_refused(maximum):
    net, x = small_net(), samples()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net[0].weight.detach().clone()

    def fn(b):
        loss = net(b).square().mean()
        optimizer.step()
        return loss

    with pytest.raises(AdaptiveUsageError, match=r"SGD\.step\(\) was called inside step\(\)"):
        step(fn, x, maximum=maximum)
    assert torch.equal(net[0].weight, before)
    optimizer.step()


def test_a_graph_from_before_the_step_is_refused_by_its_name():
    net, x = small_net(), samples()
    scale = net[0].weight.exp().sum()
    with pytest.raises(
        AdaptiveUsageError, match="uses a tensor, such as 'scale', that was computed"
    ):
        step(lambda b: (net(b) * scale.exp()).mean(), x, maximum=4)
    assert net[0].weight.grad is None


def test_a_function_that_runs_backward_itself_is_refused():
    net, x = small_net(), samples()

    def fn(b):
        loss = net(b).square().mean()
        loss.backward()
        return loss

    with pytest.raises(AdaptiveUsageError, match="or it runs backward itself"):
        step(fn, x)
    assert net[0].weight.grad is None


def test_gradients_disabled_are_explained():
    net = small_net()
    with torch.no_grad(), pytest.raises(AdaptiveUsageError, match="with gradients enabled"):
        step(lambda b: net(b).mean(), samples(), maximum=4)


def test_checkpointed_models_are_split_too():
    from torch.utils.checkpoint import checkpoint

    net, x = small_net(), samples()
    net(x).square().mean().backward()
    wanted = net[0].weight.grad
    for reentrant in (True, False):
        net.zero_grad()
        leaf = x.clone().requires_grad_()

        def fn(b, reentrant=reentrant):
            out = checkpoint(net, b, use_reentrant=reentrant)
            return out.square().sum(), out.numel()

        step(fn, leaf, maximum=4)
        torch.testing.assert_close(net[0].weight.grad, wanted)


def test_steps_in_a_scope_leave_their_gradients_and_their_loss():
    from tenure import NewDisposeScope

    net, x = small_net(), samples()
    with NewDisposeScope() as scope:
        result = step(lambda b: (net(b).sum(), len(b)), x, maximum=4)
        kept = scope.move_to_outer(result.loss)
    assert float(kept) == float(kept)
    net[0].weight.grad.add_(1)
