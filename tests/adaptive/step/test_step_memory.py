"""Steps that run out of memory, on a device where each allocation can fail and bytes count."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    NoBatchsizeCache,
    OutOfRetriesError,
    SplitMismatchError,
    memory_budget,
    step,
)
from tenure.testing import for_each_allocation

from ..finding import network
from .step_cases import gradients, squares, wanted_of


def _pairs(net, b):
    out = net(b[0])
    return {
        "ce": (F.cross_entropy(out, b[1], reduction="sum"), len(b[1])),
        "size": (out.square().sum(), out.numel()),
    }


WAYS = {
    "one pass": (lambda net, b: F.cross_entropy(net(b[0]), b[1]), {}),
    "two passes for counts": (_pairs, {}),
    "two passes for outputs": (
        lambda net, b: net(b[0]),
        {"loss": lambda out: out.logsumexp(0).sum()},
    ),
}


class Rig:
    """A model with gradients of before on the device, that can be put back to the start."""

    def __init__(self, sim, way):
        torch.manual_seed(0)
        fn, self.options = WAYS[way]
        # two layers of dropout, so that masks of chunks are no parts of the mask of the batch
        layers = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.3), nn.Dropout(0.5)
        self.sim, self.net = sim, nn.Sequential(*layers).to(sim.device)
        self.batch = torch.randn(6, 6).to(sim.device), torch.randint(3, (6,)).to(sim.device)
        self.fn = lambda b: fn(self.net, b)
        for p in self.net.parameters():
            p.grad = torch.randn_like(p)
        self.priors = [(t, t.clone()) for t in [*self.gradients(), *self.net.buffers()]]
        self.objects = [id(gradient) for gradient in self.gradients()]
        self.reset()
        self.resting_bytes = sim.requested_bytes

    def gradients(self):
        return [p.grad for p in self.net.parameters()]

    def run(self, maximum=None):
        how = {"maximum": maximum, "cache_type": NoBatchsizeCache, "verify": False}
        return step(self.fn, self.batch, batchnorm="per_chunk", **how, **self.options)

    def reset(self):
        for tensor, prior in self.priors:
            tensor.copy_(prior)
        torch.manual_seed(7)
        self.sim.module.manual_seed(7)

    def state(self):
        """All that a step may change, as copies on the host."""
        assert [id(gradient) for gradient in self.gradients()] == self.objects
        there = [t.cpu() for t in (*self.gradients(), *self.net.buffers())]
        return [*there, torch.get_rng_state(), self.sim.module.get_rng_state()]


@pytest.fixture
def without_gc():
    gc.collect()
    gc.freeze()  # or the collection before a device gives up takes most of the time
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "maximum"),
    [
        ("one pass", None),
        pytest.param("two passes for counts", 3, marks=pytest.mark.exhaustive),
        pytest.param("two passes for outputs", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_failure_at_any_allocation_leaves_what_a_run_at_the_final_split_leaves(
    sim, way, maximum, without_gc
):
    rig = Rig(sim, way)
    size = 4 if maximum is None else 2  # there is memory for more than the size below
    result = rig.run(size)
    wanted = rig.state(), float(result.loss), result.sizes
    del result
    rig.reset()
    assert sim.requested_bytes == rig.resting_bytes

    def check(failure):
        assert failure.error is None
        result = failure.result
        assert all(map(torch.equal, rig.state(), wanted[0]))
        assert (float(result.loss), result.sizes) == wanted[1:]
        assert (result.attempts, result.micro_batch) == (2, size)
        assert sim.requested_bytes == rig.resting_bytes + sum(
            t.nbytes for t in {id(t): t for t in (result.loss, *result.terms.values())}.values()
        )
        rig.reset()

    assert for_each_allocation(lambda: rig.run(maximum), check) > 20


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:step.. split a batch:UserWarning")
def test_a_failure_at_any_allocation_of_the_verification_changes_nothing(sim, without_gc):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).to(sim.device)
    x, seen = torch.randn(12, 6).to(sim.device), set()
    how = {"maximum": 4, "cache_type": NoBatchsizeCache}

    def run(verify=True):
        torch.manual_seed(7)
        sim.module.manual_seed(7)
        return step(squares(net), x, verify=verify, **how)

    loss = float(run(False).loss)
    gradients = [p.grad.cpu() for p in net.parameters()]
    net.zero_grad()
    at_rest = sim.allocated_bytes

    def check(failure):
        assert failure.error is None
        sizes = failure.result.sizes
        seen.add(sizes)
        if sizes == (4, 4, 4):
            assert float(failure.result.loss) == loss
            assert all(map(torch.equal, gradients, [p.grad.cpu() for p in net.parameters()]))
        del failure
        net.zero_grad()
        assert sim.allocated_bytes <= at_rest + 512

    assert for_each_allocation(run, check) > 40
    assert (4, 4, 4) in seen


@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_at_no_size_leaves_everything_as_it_was(sim, way, without_gc):
    rig = Rig(sim, way)
    untouched = rig.state()
    sim.budget_bytes = sim.allocated_bytes + 100
    with pytest.raises(OutOfRetriesError, match=r"attempts of '<lambda>' ran out of sim:0 memory"):
        rig.run()
    sim.budget_bytes = None
    assert all(map(torch.equal, rig.state(), untouched))
    assert sim.allocated_bytes == rig.resting_bytes


@pytest.mark.sim_allocator("exact")  # the budget is less than a segment
def test_a_budget_too_small_for_the_batch_is_kept_and_gives_the_same_gradients(sim):
    net = network(sim.device, n_layers=6)
    x, fn = torch.randn(1024, 64).to(sim.device), squares(net)  # each activation takes 256 KiB
    wanted = wanted_of(net, fn(x))
    at_rest = sim.allocated_bytes
    sim.reset_peak()
    step(fn, x)
    budget = at_rest + (sim.peak_bytes - at_rest) // 3
    net.zero_grad()
    sim.budget_bytes = budget
    with pytest.raises(torch.OutOfMemoryError):
        fn(x).backward()
    net.zero_grad()
    sim.reset_peak()
    result = step(fn, x)
    assert sim.peak_bytes <= budget
    assert 1 < len(result.sizes) == -(-len(x) // result.micro_batch)
    assert result.attempts <= 3
    torch.testing.assert_close(gradients(net), wanted, rtol=1e-5, atol=1e-7)
    # so does the verification, which refuses wrong losses
    net.zero_grad()
    with pytest.raises(SplitMismatchError, match=r"then=torch\.sqrt"):
        step(lambda b: fn(b).sqrt(), x)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("way", ["mean", "terms", "outputs", "ignored"])
def test_the_graph_of_one_chunk_at_a_time_is_alive_and_chunks_are_views(sim, way):
    net = network(sim.device, n_layers=6)
    x = torch.randn(64, 64).to(sim.device)
    loss_of, options = {
        "mean": (lambda out, b: out.square().mean(), {}),
        "terms": (lambda out, b: {"a": (out.sum(), len(b)), "b": out.square().mean()}, {}),
        "outputs": (lambda out, b: out.sum(1), {"loss": lambda o: o.std()}),
        "ignored": (lambda out, b: out.mean(), {"weight": lambda b: float(b[0, 0] != 7)}),
    }[way]
    x[32:48, 0] = 7  # chunks without weight are not run backward, and must be let go all the same

    def fn(b):
        assert b.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return loss_of(net(b), b)

    step(fn, x[:16], maximum=8, verify=False, **options)
    peaks = []
    for n in (16, 64):
        net.zero_grad()
        sim.reset_peak()
        at_rest = sim.allocated_bytes
        step(fn, x[:n], maximum=8, verify=False, **options)
        peaks.append(sim.peak_bytes - at_rest)
    # the graph of a chunk takes 12 KiB; of each a few numbers stay, of up to 512 bytes
    assert peaks[1] <= peaks[0] + 8 * 1024


def test_a_batch_with_a_graph_is_refused_when_the_step_tries_again(sim):
    encoder, net = nn.Linear(64, 64).to(sim.device), nn.Linear(64, 64).to(sim.device)
    features = encoder(torch.randn(8, 64).to(sim.device)).exp()

    def fail_in_the_end(gradient):
        sim.fail_at(1)
        return gradient

    net.weight.grad = torch.ones_like(net.weight)
    features.register_hook(fail_in_the_end)
    with pytest.raises(AdaptiveUsageError, match=r"got batch, computed from|such as 'batch', that"):
        step(squares(net), features)
    assert torch.equal(net.weight.grad.cpu(), torch.ones(64, 64))
    assert encoder.weight.grad is None


@pytest.mark.parametrize(
    ("kept_bytes", "free"),
    [
        (0, r"[78]\d\d\.\d KiB of 800\.0 KiB that were free"),
        (100 * 1024, r"6\d\d\.\d KiB of 700\.0 KiB that were free, of 800\.0 KiB in all"),
    ],
)
def test_outputs_of_the_whole_batch_that_do_not_fit_are_told_to_be_the_trouble(kept_bytes, free):
    net, x = nn.Linear(4, 4096), torch.randn(64, 4)
    told = (
        rf"; the last used {free}, and needed 16\.0 KiB more\)\. Not even 1 fits: loss= gets the "
        "outputs of the whole batch, so these and their grad"
    )
    with memory_budget("800KiB"):
        kept = torch.ones(kept_bytes // 4)
        with pytest.raises(OutOfRetriesError, match=told):
            step(net, x, loss=torch.std)
    assert net.weight.grad is None
    with memory_budget("800KiB"):
        assert step(squares(net), x).attempts > 1
    del kept


def test_a_number_with_the_memory_of_all_elements_leaves_none_of_it_behind():
    """As torch's mse_loss returns it: each chunk would leave its outputs to the next ones."""
    torch.manual_seed(0)
    net, rows = nn.Linear(64, 64), torch.randn(4000, 64)
    kept = F.mse_loss(torch.ones(10), torch.zeros(10)).untyped_storage().nbytes()
    assert kept > 4  # else this tests nothing
    with memory_budget("80KiB"):
        result = step(lambda b: F.mse_loss(net(b), b), rows, verify=False)
    assert len(result.sizes) > 40


@pytest.mark.parametrize("named", [False, True])
def test_sums_that_were_divided_are_gone_before_the_backward_pass(named):
    net, sums, alive = nn.Linear(64, 64), [], []

    def fn(b):
        total = F.mse_loss(net(b), b, reduction="sum")
        sums.append(weakref.ref(total))
        return {"error": (total, len(b))} if named else (total, len(b))

    net.bias.register_hook(lambda gradient: alive.append(sums[-1]() is not None))
    step(fn, torch.randn(8, 64))
    assert alive == [False]
