"""Modules that exchange gradients give those of the whole, and a failure leaves them whole.

On a group of one rank, where everything is real but the others.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import AdaptiveUsageError, check_split, memory_budget, plan, step

from ..ranks.launch import run_ranks
from .step_cases import contrastive, gradients, samples, small_net, worst_error


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    for _ in range(2):  # once for each thread of the group: a busy one may block its end for ever
        dist.barrier()
    dist.destroy_process_group()


class Failing(nn.Module):
    """Runs out of memory with more samples than allowed, forward or backward, in the middle."""

    def __init__(self, *, where):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)
        self.where = where
        self.most = 100

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.where == "forward":
            self.check(len(x))
        elif hidden.requires_grad:
            hidden.register_hook(lambda _: self.check(len(x)))
        return self.last(hidden)

    def check(self, n):
        if n > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def plain_gradients(net, loss_of):
    loss_of(net).backward()
    found = gradients(net)
    net.zero_grad()
    return found


KINDS = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"loss": contrastive}], ids=["one pass", "two passes"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_leaves_the_exchange_whole(kind, options, where):
    torch.manual_seed(0)
    net, x = Failing(where=where).double(), samples(9)

    def fn(b):
        out = module(b)
        return out if options else out.square().mean()

    def whole_loss(run):
        return contrastive(run(x)) if options else run(x).square().mean()

    wanted = plain_gradients(net, whole_loss)
    module = Replicated(net, **KINDS[kind])
    # fails in the very first backward pass, later with another size, and then fits
    for most, n_attempts in ((4, 2), (2, 2), (2, 1), (100, 1)):
        net.most = most
        net.zero_grad()
        result = step(fn, x, context=(kind, where, bool(options)), **options)
        assert result.attempts == n_attempts
        assert max(result.sizes) <= most
        assert worst_error(gradients(net), wanted) < 1e-10
    # and a plain step after it
    net.zero_grad()
    whole_loss(module).backward()
    assert worst_error(gradients(net), wanted) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maximum", [4, 9])
def test_gradients_are_accumulated(kind, maximum):
    net, x = small_net(), samples(9)
    wanted = plain_gradients(net, lambda n: n(x).square().mean())
    module = Replicated(net, **KINDS[kind])
    # buckets are built anew in the second step: gradients stand in those from then on
    for _ in range(3):
        net.zero_grad()
        module(x).square().mean().backward()
    step(lambda b: module(b).square().mean(), x, maximum=maximum)
    got = gradients(net)
    assert worst_error(got, {name: 2 * grad for name, grad in wanted.items()}) < 1e-10


def test_a_block_of_no_sync_around_the_step_holds():
    net, x = small_net(), samples(9)
    wanted = plain_gradients(net, lambda n: n(x).square().mean())
    module = Replicated(net)
    with module.no_sync():
        step(lambda b: module(b).square().mean(), x, maximum=4)
        assert not module.require_backward_grad_sync
    assert module.require_backward_grad_sync
    assert worst_error(gradients(net), wanted) < 1e-10


def test_a_module_that_is_seen_only_when_it_runs_is_kept_apart_from_its_first_line_on():
    net, x = small_net(), samples(9)
    hidden = {"module": Replicated(net)}
    wanted = plain_gradients(net, lambda n: n(x).square().mean())

    def fn(b):
        return globals()["_HIDDEN"]["module"](b).square().mean()

    globals()["_HIDDEN"], exchanges = hidden, []
    net.register_forward_pre_hook(
        lambda *_: exchanges.append(hidden["module"].require_backward_grad_sync)
    )
    step(fn, x, maximum=4)
    assert set(exchanges) == {False}
    assert hidden["module"].require_backward_grad_sync
    assert worst_error(gradients(net), wanted) < 1e-10


@pytest.mark.slow
def test_predictions_of_a_replica_are_those_of_its_module():
    net, x = small_net(), samples(64)
    wanted = plain_gradients(net, lambda n: n(x).square().mean())
    module = Replicated(net)

    def fn(b):
        assert dist.is_initialized()
        return module(b).square().mean()

    assert plan(fn, x, "1MiB").micro_batch == 64
    assert plan(fn, x, "11KiB").micro_batch < 64
    with memory_budget("11KiB"):
        result = step(fn, x, predict=True)
    assert (len(result.sizes) > 1, result.attempts) == (True, 1)
    assert check_split(fn, x, n_samples=4)
    assert worst_error(gradients(net), wanted) < 1e-10


def accumulate_on(rank):
    """On one rank of two: gradients that wait for an exchange are in the next one."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        net = small_net()
        module = Replicated(net, **options)
        torch.manual_seed(rank)
        parts = [samples(5) for _ in range(6)]

        def plain(b, module=module):
            module(b).square().mean().backward()

        def ours(b, module=module):
            step(lambda b: module(b).square().mean(), b)

        found = []
        for run in (plain, ours):
            net.zero_grad()
            for part in parts:
                # exchanged once in the middle, and what was is exchanged again
                with module.no_sync() if part is not parts[2] else nullcontext():
                    run(part)
            run(parts[-1])
            found.append(gradients(net))
        assert worst_error(found[1], found[0]) < 1e-10
        everywhere = [torch.empty_like(net[0].weight) for _ in range(2)]
        dist.all_gather(everywhere, net[0].weight.grad)
        assert torch.equal(*everywhere)


@pytest.mark.slow
def test_two_ranks_exchange_what_was_accumulated_without_exchange():
    run_ranks(accumulate_on, 2)


# --- modules that are sharded


def sharded(net, **options):
    mesh = DeviceMesh("cpu", [0])
    for child in net.children():
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole_gradients(net):
    return {n: p.grad.full_tensor().clone() for n, p in net.named_parameters()}


SHARDED = {
    "plain": {},
    "reduced in another type": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "kept whole": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("options", [{}, {"loss": contrastive}], ids=["one pass", "two passes"])
def test_a_sharded_module_gives_the_gradients_of_the_whole_batch(kind, options):
    net, x = small_net(), samples(9)

    def whole_loss(run):
        return contrastive(run(x)) if options else run(x).square().mean()

    def fn(b):
        out = net(b)
        return out if options else out.square().mean()

    wanted = plain_gradients(net, whole_loss)
    sharded(net, **SHARDED[kind])
    rtol = 1e-6 if "type" in kind else 1e-10
    for maximum in (4, 2, 9):
        net.zero_grad()
        for times in (1, 2):
            result = step(fn, x, maximum=maximum, **options)
            assert max(result.sizes) == maximum
            twice = {name: times * grad for name, grad in wanted.items()}
            assert worst_error(whole_gradients(net), twice) < rtol
    net.zero_grad()
    whole_loss(net).backward()
    assert worst_error(whole_gradients(net), wanted) < rtol


def test_check_split_of_a_sharded_module_is_refused():
    net, x = sharded(small_net()), samples()
    with pytest.raises(AdaptiveUsageError, match=r"Call check_split\(\) before fully_shard\(\)"):
        check_split(lambda b: net(b).square().mean(), x)


@pytest.mark.parametrize("maximum", [None, 4], ids=["whole", "split"])
def test_a_sharded_module_that_no_search_finds_is_refused_on_one_rank_too(maximum):
    globals()["_HIDDEN"] = net = sharded(small_net())
    with pytest.raises(AdaptiveUsageError, match=r"a sharded module, .* that it has not found"):
        step(lambda b: globals()["_HIDDEN"](b).square().mean(), samples(), maximum=maximum)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_sharded_module_that_ran_out_of_memory_is_not_tried_again():
    net, x = sharded(Failing(where="backward").double()), samples()
    net.most = 4
    with pytest.raises(AdaptiveUsageError, match=r"ran out of memory in a module of fully_shard"):
        step(lambda b: net(b).square().mean(), x)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_module_of_the_first_fsdp_is_refused_where_the_batch_is_split():
    net, x = FullyShardedDataParallel(small_net(), device_id=torch.device("cpu")), samples()
    with pytest.raises(AdaptiveUsageError, match="a module of FullyShardedDataParallel"):
        step(lambda b: net(b).square().mean(), x, maximum=4)


@pytest.mark.parametrize("special", ["static_graph=True", "a comm hook"])
def test_a_replica_that_acts_in_each_pass_is_refused_on_one_rank_too(special):
    net, x = small_net(), samples()
    module = Replicated(net, static_graph=special == "static_graph=True")
    if special == "a comm hook":
        module.register_comm_hook(None, allreduce_hook)
    with pytest.raises(AdaptiveUsageError, match=f"with {special}, which acts while the module"):
        step(lambda b: module(b).square().mean(), x)
    assert not gradients(net)


def test_gradients_of_a_sharded_module_that_wait_for_an_exchange_are_refused():
    net, x = small_net(), samples(9)
    sharded(net)
    net.set_requires_gradient_sync(False)
    net(x).square().mean().backward()
    net.set_requires_gradient_sync(True)
    with pytest.raises(
        AdaptiveUsageError, match="gradients that a backward pass without exchange has left"
    ):
        step(lambda b: net(b).square().mean(), x)
