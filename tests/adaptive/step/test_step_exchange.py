"""Modules that exchange gradients give those of the whole, and a failure leaves them whole.

On a group of one rank, where everything is real but the others.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import AdaptiveUsageError, check_split, memory_budget, plan, step

from ..attempt.failures import out_of_memory_above
from .step_cases import (
    compare,
    contrastive,
    gradients,
    samples,
    small_net,
    squares,
    unseen,
    wanted_of,
    worst_error,
)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    for _ in range(2):  # once for each thread of the group: a busy one may block its end for ever
        dist.barrier()
    dist.destroy_process_group()


def failing(where, most=100):
    """A net that runs out of memory with more samples, forward or backward, in the middle."""
    net = small_net()
    net.most = most

    def hook(module, args, out):
        if where == "forward":
            out_of_memory_above(net.most)(len(out))
        elif out.requires_grad:
            out.register_hook(lambda _: out_of_memory_above(net.most)(len(out)))

    net[1].register_forward_hook(hook)
    return net


TWO_PASSES = {"loss": contrastive}


@pytest.mark.parametrize(
    ("kind", "where", "options"),
    [
        ({}, "backward", {}),
        ({"find_unused_parameters": True}, "forward", {}),
        ({"gradient_as_bucket_view": True}, "backward", TWO_PASSES),
    ],
)
def test_a_failure_leaves_the_exchange_whole(kind, where, options):
    net, x = failing(where), samples(9)
    whole = (lambda run: contrastive(run(x))) if options else lambda run: squares(run)(x)
    wanted = wanted_of(net, whole(net))
    module = Replicated(net, **kind)
    fn = module if options else squares(module)
    # fails in the very first backward pass, later with another size, and then fits
    for most, n_attempts in ((4, 2), (2, 2), (2, 1), (100, 1)):
        net.most = most
        net.zero_grad()
        result = step(fn, x, context=(*kind, where, bool(options)), **options)
        assert result.attempts == n_attempts
        assert max(result.sizes) <= most
        assert worst_error(gradients(net), wanted) < 1e-10
    # and a plain step after it
    net.zero_grad()
    whole(module).backward()
    assert worst_error(gradients(net), wanted) < 1e-10


def test_a_module_that_is_seen_only_when_it_runs_is_kept_apart_from_its_first_line_on():
    net, x, exchanges = small_net(), samples(9), []
    module = Replicated(net)
    net.register_forward_pre_hook(lambda *_: exchanges.append(module.require_backward_grad_sync))
    fn, whole = squares(unseen(module)), squares(net)(x)
    exchanges.clear()
    compare(net, whole, fn, x, maximum=4)
    assert set(exchanges) == {False}
    assert module.require_backward_grad_sync


def test_predictions_of_a_replica_are_those_of_its_module():
    net, x = small_net(), samples(64)
    wanted = wanted_of(net, squares(net)(x))
    module = Replicated(net)

    def fn(b):
        assert dist.is_initialized()
        return module(b).square().mean()

    assert plan(fn, x, "11KiB").micro_batch < 64
    with memory_budget("11KiB"):
        result = step(fn, x, predict=True)
    assert (len(result.sizes) > 1, result.attempts) == (True, 1)
    assert check_split(fn, x, n_samples=4)
    assert worst_error(gradients(net), wanted) < 1e-10


@pytest.mark.parametrize("special", ["static_graph=True", "a comm hook"])
def test_a_replica_that_acts_in_each_pass_is_refused_on_one_rank_too(special):
    net, x = small_net(), samples()
    module = Replicated(net, static_graph=special == "static_graph=True")
    if special == "a comm hook":
        module.register_comm_hook(None, allreduce_hook)
    with pytest.raises(AdaptiveUsageError, match=f"with {special}, which acts while the module"):
        step(squares(module), x)
    assert not gradients(net)


# --- modules that are sharded


def sharded(net, **options):
    mesh = DeviceMesh("cpu", [0])
    for child in net.children():
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def _waiting(net):
    sharded(net).set_requires_gradient_sync(False)
    net(samples()).mean().backward()
    net.set_requires_gradient_sync(True)
    return net


REFUSED = {
    r"Call check_split\(\) before fully_shard\(\)": (sharded, {"ask": check_split}),
    r"a sharded module, .* that it has not found": (sharded, {"hidden": True}),
    r"a sharded module, .* that it has not": (sharded, {"hidden": True, "maximum": 4}),
    "ran out of memory in a module of fully_shard": (
        lambda _: sharded(failing("backward", 4)),
        {},
    ),
    "gradients that a backward pass without exchange has left": (_waiting, {}),
    "a module of FullyShardedDataParallel": (
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        {"maximum": 4},
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("message", REFUSED)
def test_what_a_sharded_module_does_not_allow_is_refused(message):
    make, given = REFUSED[message]
    options = dict(given)
    ask, is_hidden = options.pop("ask", step), options.pop("hidden", False)
    module = make(small_net())
    fn = squares(unseen(module) if is_hidden else module)
    with pytest.raises(AdaptiveUsageError, match=message):
        ask(fn, samples(), **options)
