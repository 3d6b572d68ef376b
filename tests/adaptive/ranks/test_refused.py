"""What a step of several ranks refuses: by name, on all of them, and before anything runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import AdaptiveUsageError, RemoteRankError, find_batch_size, step

from ..step.step_cases import gradients, unseen
from .launch import run_checks
from .rank_cases import Fails, all_samples, net_of, square, squares


def replica(**options):
    return Replicated(net_of(), **options)


def hooked():
    module = replica()
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return module


def post_hooked():
    module = replica()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return module


class Stepping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net_of()

    def forward(self, b):
        return step(squares(self.net), b, maximum=4)


def joined_step(module):
    with Join([module]):
        try:
            return plain(module)
        finally:
            # so that the end of the block waits for nobody
            module._join_config = module._join_config._replace(enable=False)


def in_two_groups(module):
    other = replica(process_group=dist.new_group([0, 1]))
    return step(lambda b: square(module, b) + square(other, b), all_samples()[0])


def computed_batch(module):
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    return step(lambda x: module(x).square().mean(), all_samples()[0]["x"] * weight)


def plain(module, **options):
    return step(squares(module), all_samples()[0], **options)


def terms(module, made):
    return step(lambda b: made(square(module, b)), all_samples()[0])


def step_of_a_set(module):
    nets = set(module)

    def fn(b):
        return sum(net(b["x"]).square().mean() for net in nets)

    step(fn, all_samples()[dist.get_rank()], group=dist.group.WORLD)


def with_buffer():
    net = net_of()
    net.register_buffer("cache", torch.zeros(3))
    return Replicated(net)


def growing_buffers(module):
    def fn(b):
        module.module.cache = torch.zeros(len(b["x"]))
        return module(b["x"]).square().mean()

    step(fn, None if dist.get_rank() else all_samples()[0])


def unlike(first, other):
    """Terms of a loss on one rank, and others on the other."""
    return lambda m: terms(m, other if dist.get_rank() else first)


def other_calls(module, **options):
    def one(b):
        return square(module, b)

    def another(b):
        return square(module, b)

    fn = another if dist.get_rank() and not options else one
    step(fn, all_samples()[0], **(options if dist.get_rank() else {}))


def searching(module, work):
    find_batch_size(work, high=8, group=dist.group.WORLD)


def searching_elsewhere(module):
    # on two lines, by which they are told apart
    work = [
        lambda n: torch.ones(1),
        lambda n: torch.zeros(1),
    ][dist.get_rank()]
    searching(module, work)


UNLIKE = "other terms on one rank than on another"
ELSEWHERE = "Ranks that work together are in different calls"
CASES = {
    "a count on one rank": (replica, unlike(lambda s: (s * 9, 9), lambda s: s * 0.0), UNLIKE),
    "another order of terms": (
        replica,
        unlike(lambda s: {"a": 3 * s, "b": 2 * s}, lambda s: {"b": 2 * s, "a": 3 * s}),
        UNLIKE,
    ),
    "a count that is nan": (
        replica,
        unlike(lambda s: (s * 3, 3.0), lambda s: (s * 3, torch.tensor(float("nan")))),
        "returned a count of nan",
    ),
    "a weight that is nan": (
        replica,
        lambda m: plain(m, weight=lambda _: float("nan") if dist.get_rank() else 3.0),
        "weight() returned nan",
    ),
    "other functions": (replica, other_calls, f"{ELSEWHERE}: step('one') ("),
    "other losses": (replica, lambda m: other_calls(m, loss="sum"), ELSEWHERE),
    "other kinds": (replica, lambda m: other_calls(m, per_rank=True), ELSEWHERE),
    "other lambdas": (replica, searching_elsewhere, "different calls, by other functions of one"),
    "other parameters": (
        lambda: nn.Linear(4, 3 + dist.get_rank()).double(),
        lambda m: plain(m, group=dist.group.WORLD),
        "with parameters or buffers of other shapes or in another order: step('<lambda>')",
    ),
    "a collective": (
        replica,
        lambda m: terms(m, lambda loss: dist.all_reduce(loss.detach().clone()) or loss),
        "called torch.distributed.all_reduce()",
    ),
    "a collective in a search": (
        replica,
        lambda m: searching(m, lambda n: dist.barrier()),
        "called torch.distributed.barrier()",
    ),
    "a replica in a search": (
        replica,
        lambda m: searching(m, lambda n: m(torch.ones(n, 4).double()).sum()),
        "runs a DistributedDataParallel",
    ),
    "a comm hook": (hooked, plain, "with a comm hook, which acts while the module runs"),
    "a static graph": (lambda: replica(static_graph=True), plain, "with static_graph=True"),
    "SyncBatchNorm": (
        # a replica of it is for devices alone
        lambda: nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8)).double(),
        lambda m: plain(m, group=dist.group.WORLD),
        "SyncBatchNorm in training",
    ),
    "a step in a replica": (
        lambda: Replicated(Stepping()),
        lambda m: m(all_samples()[0]),
        "runs inside the forward pass of a DistributedDataParallel",
    ),
    "Join": (replica, joined_step, "with a block of torch's Join"),
    "two groups": (replica, in_two_groups, "whose process group is not that of the step"),
    "then=": (replica, lambda m: plain(m, then=torch.sqrt), "got then= a function"),
    "loss=": (
        replica,
        lambda m: step(lambda b: m(b["x"]), all_samples()[0], loss=torch.std),
        "got loss= a function",
    ),
    "a count among terms": (
        replica,
        lambda m: terms(m, lambda loss: {"a": loss, "b": (loss * 7, 7)}),
        "a count with 'b'",
    ),
    "a batch with a graph": (replica, computed_batch, "a batch that was computed with gradients"),
    "a hidden replica": (
        replica,
        lambda m: plain(unseen(m)),
        "that it has not found through its function",
    ),
    "replicas in a set": (
        lambda: nn.ModuleList(net_of() for _ in range(2)),
        step_of_a_set,
        "in a set, nets, whose order is another",
    ),
    "buffers that grow": (with_buffer, growing_buffers, "with buffers of other shapes"),
    "many terms": (
        replica,
        lambda m: terms(m, lambda loss: {str(i): loss * 1 for i in range(17)}),
        "returned 17 terms, and ranks can agree on 16",
    ),
    "post hooks": (post_hooked, plain, "4 of the parameters have a hook"),
    "a sparse gradient": (
        lambda: Replicated(nn.Embedding(5, 3, sparse=True)),
        lambda m: step(lambda b: m(b).mean(), torch.arange(5)),
        "has a sparse gradient",
    ),
}


def each_case(rank):
    for name, (make, call, text) in CASES.items():
        module, told = make(), ""
        # one rank alone knows its number
        kind = RemoteRankError if "nan" in name and not rank else AdaptiveUsageError
        try:
            call(module)
        except kind as error:
            told = str(error)
        assert text in told, name
        assert not gradients(module), name
    # nothing was sent, and nobody waits
    found = torch.tensor(1.0 + rank)
    dist.all_reduce(found)
    assert found == 3


def a_collective_on_one_rank_alone(rank):
    """As where the others have no samples, or run out of memory before it."""
    for part, most in ((None, None), (all_samples()[1], 2)):
        net = net_of()
        module = Replicated(net)

        def fn(b, module=module):
            loss = square(module, b)
            dist.all_reduce(loss.detach().clone())
            return loss

        with pytest.raises((AdaptiveUsageError, RemoteRankError)) as caught:
            step(Fails(fn, most if rank else None), part if rank else all_samples()[0])
        assert "called torch.distributed.all_reduce()" in str(caught.value)
        assert "Nothing was sent" in str(caught.value)
        assert not gradients(net)


def a_group_without_this_rank(rank):
    group, module = dist.new_group([0]), net_of()
    if rank:
        with pytest.raises(AdaptiveUsageError, match="rank 1 of all, is no member of"):
            plain(module, group=group)
    else:
        plain(module, group=group)


def test_each_is_an_error_by_name_on_all_ranks_and_changes_nothing():
    run_checks(each_case, a_collective_on_one_rank_alone, a_group_without_this_rank)


def test_a_process_alone_asks_for_no_group():
    net = net_of()
    result = step(lambda b: square(net, b), all_samples()[0], group="anything", per_rank=True)
    assert result.n_samples == 9
    assert find_batch_size(lambda n: n, high=8, margin=0, group="any") == 8
