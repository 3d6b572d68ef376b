"""A step of sharded modules: planned on all ranks, run once, with the gradients of all samples."""

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    OutOfRetriesError,
    RemoteRankError,
    memory_budget,
    step,
)

# private: a test can't wait as long as a rank that others have left does
from tenure.adaptive._step._across import _planned

from ..step.step_cases import unseen, wanted_of, worst_error
from .launch import run_checks, run_ranks
from .sharded_nets import KINDS, loss_of, net_of, sharded, tokens, whole, whole_gradients

RTOL = 1e-10
IGNORED = -100


def batch_of(rank, kind="plain"):
    # ranks that are parallel over tensors have the same samples
    return tokens(9) if kind == "tensor parallel" else tokens((9, 5)[rank], seed=rank)


def all_samples(kind="plain"):
    return batch_of(0, kind) if kind == "tensor parallel" else torch.cat([batch_of(0), batch_of(1)])


def plain_net(**of_net):
    return whole(depth=1, **of_net).double()


def sharded_net(kind="plain"):
    return net_of(kind, torch.float64, depth=1)


def mean(net, reduction="mean"):
    # not in half precision: 64 bits are compared
    return lambda x: F.cross_entropy(net(x).flatten(0, 1), x.flatten(), reduction=reduction)


def differs(net, loss_of_one, **of_net):
    """The largest difference from the gradients of one rank, beside the largest of them."""
    plain, found = plain_net(**of_net), whole_gradients(net)
    wanted = wanted_of(plain, loss_of_one(plain))
    worst = worst_error(found, {name: wanted[name] for name in found})
    return worst, found.keys() == wanted.keys()


def exactly(net, loss_of_one=lambda net: mean(net)(all_samples()), **of_net):
    worst, has_all = differs(net, loss_of_one, **of_net)
    assert has_all
    assert worst < RTOL


def is_untouched(net):
    return all(p.grad is None for p in net.parameters())


def refused(rank, fn, text, net, *, own=True, **options):
    """A step of two micro-batches is an error by name, and writes no gradient."""
    with pytest.raises(AdaptiveUsageError if own else RemoteRankError) as caught:
        step(fn, batch_of(rank), maximum=5, **options)
    assert text in str(caught.value)
    assert is_untouched(net)


# --- gradients


def exact(rank):
    for kind in ("padded", "tensor parallel", "kept whole", "checkpoints"):
        of_net, x, everything = KINDS[kind][2], batch_of(rank, kind), all_samples(kind)
        net, of_all = sharded_net(kind), lambda net, x=everything: mean(net)(x)
        # a pass without gradients may leave parameters whole
        with torch.no_grad():
            net(x)
        for maximum, n_parts in ((4, 3), (9, 1)):
            net.zero_grad()
            result = step(mean(net), x, maximum=maximum)
            assert len(result.sizes) == n_parts
            assert sum(result.sizes) == len(x)
            assert max(result.sizes) <= -(-9 // n_parts)
            exactly(net, of_all, **of_net)
            assert abs(float(result.loss) - float(of_all(plain_net(**of_net)).detach())) < 1e-12
            assert result.n_samples == len(everything) * (2 if kind == "tensor parallel" else 1)
        # added to what was there, and a plain pass works on
        step(mean(net), x)
        exactly(net, lambda net, of_all=of_all: 2 * of_all(net), **of_net)
        net.zero_grad()
        mean(net)(x).backward()


def other_losses(rank):
    net = sharded_net()
    result = step(mean(net, "sum"), batch_of(rank), maximum=4, loss="sum")
    total = mean(plain_net(), "sum")(all_samples()).detach()
    assert abs(float(result.loss) - float(total)) < 1e-10
    exactly(net, lambda net: mean(net, "sum")(all_samples()))
    net = sharded_net()
    step(mean(net), batch_of(rank), then=torch.sqrt, per_rank=True, maximum=3)
    exactly(net, lambda net: sum(mean(net)(batch_of(each)).sqrt() for each in range(2)) / 2)
    # gradients that are divided by another number
    net = sharded_net()
    for module in (net, *net.blocks):
        module.set_gradient_divide_factor(1.0)
    step(mean(net), batch_of(rank), maximum=4)
    exactly(net)
    # gradients that are added up in 32 bits
    net = sharded(plain_net(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    step(mean(net), batch_of(rank), maximum=4)
    assert differs(net, lambda net: mean(net)(all_samples()))[0] < 1e-5


def tensors_that_are_no_parameters(rank):
    """They are brought to no other rank, and have the scale that they have beside replicas."""
    for reduction, divisor, n in (("mean", None, 2), ("sum", None, 1), ("mean", 1.0, 2)):
        net, scales = sharded_net(), [torch.ones(1, dtype=torch.float64) for _ in range(2)]
        for module in (net, *net.blocks):
            module.set_gradient_divide_factor(divisor)
        for scale in scales:
            scale.requires_grad_()

        def loss(net, b, scale, reduction=reduction):
            return getattr(net(b).square() * scale, reduction)()

        fn = partial(loss, net, scale=scales[0])
        step(fn, batch_of(rank), loss=reduction, maximum=4)
        loss(plain_net(), batch_of(rank), scales[1]).backward()
        share = len(batch_of(rank)) / len(all_samples()) if reduction == "mean" else 1
        torch.testing.assert_close(scales[0].grad, scales[1].grad * n * share)


def known(rank, ignored):
    """Samples whose labels are ignored where ``ignored`` says so, from a sample on to another."""
    x = batch_of(rank)
    y = x.where(x > 20, IGNORED)
    for where, start, end in ignored:
        if where == rank:
            y[start:end] = IGNORED
    return {"x": x, "y": y}


def n_known(b):
    return (b["y"] != IGNORED).sum()


def mean_of_known(net, has_terms):
    """The mean over known labels; 0 / 0 where there are none."""

    def fn(b):
        out, y = net(b["x"]).flatten(0, 1), b["y"].flatten()
        words = F.cross_entropy(out, y)
        return {"words": words, "size": out[y != IGNORED].square().mean()} if has_terms else words

    return fn


def samples_that_weigh_nothing(rank):
    """Every rank runs backward, or others would wait: of a rank, and of a micro-batch."""
    for ignored, has_terms in (([(1, 0, 5)], False), ([(0, 0, 3), (1, 3, 5)], True)):
        parts, net = [known(each, ignored) for each in range(2)], sharded_net()
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

        def whole_loss(net, joined=joined, has_terms=has_terms):
            loss = mean_of_known(net, has_terms)(joined)
            return sum(loss.values()) if has_terms else loss

        result = step(mean_of_known(net, has_terms), parts[rank], weight=n_known, maximum=4)
        assert abs(float(result.loss) - float(whole_loss(plain_net()).detach())) < 1e-10
        exactly(net, whole_loss)
    # if none weighs anything, the loss has no value, and nothing is learned, as of torch
    net, part = sharded_net(), known(rank, [(0, 0, 9), (1, 0, 5)])
    result = step(mean_of_known(net, False), part, weight=n_known, maximum=4)
    assert result.loss.isnan()
    assert len(found := whole_gradients(net)) == len([*net.parameters()])
    assert not any(gradient.any() for gradient in found.values())


def outputs_that_are_not_used(rank):
    """The loss of all outputs leaves out those of the second micro-batch of rank 1."""
    parts, used = [tokens(6, seed=each) for each in range(2)], [slice(0, 6), slice(0, 3)]

    def loss(which):
        return lambda out: out[used[which]].square().mean()

    net = sharded_net()
    step(net, parts[rank], loss=loss(rank), per_rank=True, maximum=3)
    exactly(net, lambda net: sum(loss(each)(net(parts[each])) for each in range(2)) / 2)


def a_root_that_was_frozen_in_the_pass_before(rank):
    """A root stays whole then, and what the user thaws is the whole parameter."""
    net = sharded_net()
    net.requires_grad_(False)
    with torch.no_grad():
        mean(net)(batch_of(rank))
    net.requires_grad_(True)
    step(mean(net), batch_of(rank), maximum=4)
    exactly(net)


def hooks_that_only_autograd_runs(rank):
    """A module of fully_shard brings gradients without it, so no hook of a shard runs."""
    net, ran = sharded_net(), []
    for parameter in net.parameters():
        parameter.register_hook(ran.append)
    for run in (lambda fn, x: fn(x).backward(), partial(step, maximum=4)):
        run(mean(net), batch_of(rank))
    assert not ran


def penalty(net):
    found = 0.0
    for p in net.parameters():
        found = found + (p.full_tensor() if hasattr(p, "full_tensor") else p).square().sum()
    return 0.1 * found


def penalties(rank):
    """Exact after a step, and in a mean that ranks share alike; else refused."""
    net = sharded_net()

    def fn(x):
        return mean(net)(x) + penalty(net)

    step(fn, batch_of(0), maximum=4)
    exactly(net, lambda net: mean(net)(batch_of(0)) + penalty(net))
    net.zero_grad()
    refused(rank, fn, "depends on shards of parameters directly", net)
    refused(rank, fn, "depends on shards of parameters directly", net, loss="sum")
    refused(rank, mean(net), "got once=", net, once=lambda: penalty(net))
    step(mean(net), batch_of(rank), maximum=4)
    # of parts that ranks have the sum is one, too
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    exactly(net, lambda net: mean(net)(all_samples()) + penalty(net))


# --- refused on all ranks


def settings_and_arguments_that_are_refused(rank):
    net = sharded_net()
    net.blocks[0].set_gradient_divide_factor(1.0)
    refused(rank, mean(net), "divide gradients by 1, 2", net)
    net = sharded_net()
    net.set_requires_gradient_sync(False)
    refused(rank, mean(net), "set_requires_gradient_sync(False)", net)
    net.set_requires_gradient_sync(True)
    refused(rank, mean(unseen(net)), "runs a sharded module", net)
    model = net if rank else net.state_dict()
    refused(rank, mean(net), "as model=", net, own=not rank, model=model)
    alike = "(loss='mean', per_rank=True; "
    refused(rank, mean(net), alike, net, per_rank=bool(rank))

    def counted(x):
        each = mean(net, "none")(x)
        return each.sum(), each.numel()

    exchanged = "sharded modules have exchanged gradients by then"
    refused(rank, counted, exchanged, net, per_rank=True)
    few, none = tokens((9, 2)[rank]), None if rank else tokens(9)
    told = r"split into 3 micro-batches on every rank.* one rank has 2 samples"
    with pytest.raises(AdaptiveUsageError, match=told):
        step(mean(net), few, maximum=4)
    kind = AdaptiveUsageError if rank else RemoteRankError
    with pytest.raises(kind, match="got no samples on rank 1"):
        step(mean(net), none, maximum=4)
    step(mean(unseen(net)), batch_of(rank), maximum=4, model=net)
    exactly(net)
    # a trained parameter that is not sharded
    net = plain_net()
    for block in net.blocks:
        fully_shard(block)
    refused(rank, mean(net), "Call fully_shard() on the root", net)
    for part in (net.words, net.norm, net.head):
        part.requires_grad_(False)
    step(mean(net), batch_of(rank), maximum=4)
    assert differs(net, lambda net: mean(net)(all_samples()))[0] < RTOL
    trained = {name for name, _ in net.named_parameters() if name.startswith("blocks")}
    assert whole_gradients(net).keys() == trained


# --- sizes and failures


def an_error_of_fully_shard_itself(rank):
    """It is no rank that died, though torch.distributed raises it."""
    with torch.device("meta"):
        net = plain_net()
    with pytest.raises(RuntimeError, match=r"^FSDP parameters should be materialized"):
        step(mean(sharded(net)), batch_of(rank))


def a_failure_after_all_passes_of_one_rank(rank):
    """Nothing is delivered on either, and the next step goes on."""
    net, n_passes = sharded_net(), []

    def backward(loss):
        loss.backward()
        n_passes.append(loss)
        if rank and len(n_passes) == 3:
            raise ValueError("no penalty")

    told = "no penalty" if rank else r"step\('<lambda>'\).* rank 1 \(ValueError: no penalty\)"
    with pytest.raises(ValueError if rank else RemoteRankError, match=told):
        step(mean(net), batch_of(rank), maximum=4, backward=backward)
    assert is_untouched(net)
    step(mean(net), batch_of(rank), maximum=4)
    exactly(net)


def out_of_memory(x, most):
    if not isinstance(x, FakeTensor) and len(x) > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def the_step_after_one_that_ran_out_on_all_ranks(rank):
    """It plans for less than what nobody has predicted: above 4 samples, memory runs out."""
    net = sharded_net()

    def fn(x):
        out = net(x)
        out_of_memory(x, 4)
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

    where = ("rank 0, in micro-batches of 9 .wanted 1.0 GiB more", "rank 1, in micro-batches of 5")
    told = rf"^'fn' ran out of .* on {where[rank]}.*predicted were .*that were free of cpu"
    for is_first in (True, False):
        fails = pytest.raises(OutOfRetriesError, match=told) if is_first else nullcontext()
        with memory_budget("1GiB"), fails:
            result = step(fn, batch_of(rank))
        assert not is_first or is_untouched(net)
    assert max(result.sizes) <= 4
    n_parts = [None, None]
    dist.all_gather_object(n_parts, len(result.sizes))
    assert n_parts[0] == n_parts[1]
    exactly(net)


def test_two_ranks_get_the_gradients_of_all_samples_or_an_error():
    run_checks(
        exact, other_losses, tensors_that_are_no_parameters, samples_that_weigh_nothing,
        outputs_that_are_not_used, a_root_that_was_frozen_in_the_pass_before,
        hooks_that_only_autograd_runs, penalties, settings_and_arguments_that_are_refused,
        an_error_of_fully_shard_itself, a_failure_after_all_passes_of_one_rank,
        the_step_after_one_that_ran_out_on_all_ranks, timeout=240,
    )  # fmt: skip


SAMPLES = 512


def planned(rank):
    """In less than the whole takes, and least on one rank: the sizes, and how often it ran."""
    net = sharded(whole(depth=1))
    # a thread of gloo lets go of the gathered block late, 49 KiB: less than the margin for these
    x, ran = tokens(SAMPLES, seed=rank), []

    def fn(x):
        if not isinstance(x, FakeTensor):
            ran.append(len(x))
        return loss_of(net)(x)

    with memory_budget("1GiB") as budget:
        fn(x).backward()
    found = []
    for _ in range(2):
        net.zero_grad()
        ran.clear()
        with memory_budget(int(budget.peak_bytes * (0.7, 0.42)[rank])):
            result = step(fn, x)
        found.append([result.micro_batch, result.attempts, ran[:]])
    return found


@pytest.mark.slow
def test_sizes_are_planned_by_the_rank_that_has_the_least_memory():
    first, second = run_ranks(planned, 2, timeout=180)
    assert first == second
    # what fitted is remembered
    assert first[0] == first[1]
    size, attempts, ran = first[0]
    assert size < SAMPLES
    assert attempts == 1
    assert sum(ran) == SAMPLES


def models_on_some_ranks(rank):
    """Two models, each on two of four ranks: they name a group beside their own."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    net = plain_net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh)
    mine = "sharded over ranks 0, 1, and ranks" if rank < 2 else "sharded over ranks 2, 3, and"
    refused(rank % 2, mean(net), mine, net)
    own = "got a group= in which its sharded modules talk"
    refused(rank % 2, mean(net), own, net, group=mesh.get_group())
    step(mean(net), batch_of(rank % 2), maximum=4, group=groups[rank // 2])
    exactly(net)


def a_parameter_that_is_only_parallel(rank):
    """Beside others of fully_shard, over ranks with other samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    style = RowwiseParallel(input_layouts=Replicate())
    net = parallelize_module(plain_net(), mesh["tensor"], {"words": style, "head": style})
    for part in (*net.blocks, net.norm, net.head):
        fully_shard(part, mesh=mesh["data"])
    refused(rank // 2, mean(net), "'words.weight', float64[60, 32]", net)


def test_models_on_some_ranks_name_a_group_of_these_beside_their_own():
    run_checks(models_on_some_ranks, a_parameter_that_is_only_parallel, n=4)


def fails_alone(rank, folder):
    """On one rank in the middle of a forward pass: the other waits in the next one."""
    _planned._PATIENCE_S = 1.0
    net = sharded(whole(depth=2))
    if rank:
        net.blocks[1].narrow.register_forward_hook(lambda *_: out_of_memory(torch.ones(1), 0))
    try:
        step(loss_of(net), tokens(4), maximum=4)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    Path(folder, f"answer{rank}").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_hears_of_it_when_that_ends(tmp_path):
    run_ranks(fails_alone, 2, folder=str(tmp_path))
    waiting, failed = (json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2))
    assert failed.startswith("OutOfRetriesError")
    assert "The other ranks could not be told of it" in failed
    assert waiting.startswith("RemoteRankError: One of 2 ranks has died, has raised an error")
    assert "With sharded modules, let all processes end" in waiting
