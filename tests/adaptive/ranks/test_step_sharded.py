"""A step of sharded modules: planned on all ranks, run once, with the gradients of all samples."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    OutOfRetriesError,
    RemoteRankError,
    memory_budget,
    step,
)

from .launch import run_checks, run_ranks
from .sharded_nets import (
    KINDS,
    loss_of,
    net_of,
    sharded,
    tokens,
    wait_at_most,
    whole,
    whole_gradients,
)

SIZES = (9, 5)
RTOL = 1e-10


def batch_of(rank, kind="plain"):
    # ranks that are parallel over tensors have the same samples
    return tokens(SIZES[0]) if kind == "tensor parallel" else tokens(SIZES[rank], seed=rank)


def all_samples(kind="plain"):
    if kind == "tensor parallel":
        return batch_of(0, kind)
    return torch.cat([batch_of(rank) for rank in range(len(SIZES))])


def wanted_of(loss_of_net, kind="plain"):
    """The loss and the gradients of one rank that has all."""
    net = whole(**KINDS[kind][2]).double()
    loss = loss_of_net(net)(all_samples(kind))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in net.named_parameters()}


def differs(net, wanted):
    """The largest difference, beside the largest gradient."""
    found, worst = whole_gradients(net), 0.0
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), 1e-6)
        worst = max(worst, float((found[name] - gradient).abs().max()) / scale)
    return worst


def mean(net):
    # not in half precision: 64 bits are compared
    def fn(x):
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    return fn


def is_untouched(net):
    return all(p.grad is None for p in net.parameters())


def sharded_net():
    return sharded(whole().double())


def refused(rank, fn, text, net, *, own=True, **options):
    """A step of two micro-batches is an error by name, and writes no gradient."""
    kind = AdaptiveUsageError if own else RemoteRankError
    with pytest.raises(kind) as caught:
        step(fn, batch_of(rank), maximum=5, **options)
    assert text in str(caught.value)
    assert is_untouched(net)


# --- gradients


def exact(rank, kind):
    net, is_alike = net_of(kind, torch.float64), kind == "tensor parallel"
    loss, wanted = wanted_of(mean, kind)
    x = batch_of(rank, kind)
    for maximum, n_parts in ((4, 3), (9, 1), (4, 3)):
        net.zero_grad()
        result = step(mean(net), x, maximum=maximum)
        assert len(result.sizes) == n_parts
        assert sum(result.sizes) == len(x)
        assert max(result.sizes) <= -(-9 // n_parts)
        assert differs(net, wanted) < RTOL
        assert abs(float(result.loss) - loss) < 1e-12
        assert result.n_samples == (18 if is_alike else 14)
    # added to what was there, and a plain pass works on
    step(mean(net), x)
    assert differs(net, {name: 2 * gradient for name, gradient in wanted.items()}) < RTOL
    net.zero_grad()
    mean(net)(x).backward()


def exact_where_padded(rank):
    exact(rank, "padded")


def exact_in_parallel(rank):
    exact(rank, "tensor parallel")


def exact_where_kept_whole(rank):
    exact(rank, "kept whole")


def exact_with_checkpoints(rank):
    exact(rank, "checkpoints")


def other_losses(rank):
    def summed(net):
        return lambda x: F.cross_entropy(net(x).flatten(0, 1), x.flatten(), reduction="sum")

    loss, wanted = wanted_of(summed)
    net = sharded_net()
    result = step(summed(net), batch_of(rank), maximum=4, loss="sum")
    assert abs(float(result.loss) - loss) < 1e-10
    assert differs(net, wanted) < RTOL
    plain, net = whole().double(), sharded_net()
    (sum(mean(plain)(batch_of(each)).sqrt() for each in range(2)) / 2).backward()
    step(mean(net), batch_of(rank), then=torch.sqrt, per_rank=True, maximum=3)
    assert differs(net, {name: p.grad for name, p in plain.named_parameters()}) < RTOL


IGNORED = -100


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


def mean_of_known(net, *, has_terms=False):
    """The mean over known labels; 0 / 0 where there are none."""

    def fn(b):
        out, y = net(b["x"]).flatten(0, 1), b["y"].flatten()
        words = F.cross_entropy(out, y)
        return {"words": words, "size": out[y != IGNORED].square().mean()} if has_terms else words

    return fn


def samples_that_weigh_nothing(rank):
    """Every rank runs backward, or others would wait: of a rank, and of a micro-batch."""
    for ignored in ([(1, 0, 5)], [(0, 0, 3), (1, 3, 5)]):
        parts = [known(each, ignored) for each in range(2)]
        for has_terms in (False, True):
            plain, net = whole().double(), sharded_net()
            joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            loss = mean_of_known(plain, has_terms=has_terms)(joined)
            loss = sum(loss.values()) if has_terms else loss
            loss.backward()
            fn = mean_of_known(net, has_terms=has_terms)
            result = step(fn, parts[rank], weight=n_known, maximum=4)
            assert abs(float(result.loss) - float(loss.detach())) < 1e-10
            assert differs(net, {name: p.grad for name, p in plain.named_parameters()}) < RTOL


def samples_of_which_none_weighs_anything(rank):
    """As of torch: the loss has no value, and nothing is learned."""
    net, part = sharded_net(), known(rank, [(0, 0, 9), (1, 0, 5)])
    result = step(mean_of_known(net), part, weight=n_known, maximum=4)
    assert result.loss.isnan()
    assert differs(net, {name: torch.zeros(p.shape) for name, p in whole().named_parameters()}) == 0


def outputs_that_are_not_used(rank):
    """The loss of all outputs leaves out those of the second micro-batch of rank 1."""
    parts, used = [tokens(6, seed=each) for each in range(2)], [slice(0, 6), slice(0, 3)]

    def loss(which):
        return lambda out: out[used[which]].square().mean()

    plain, net = whole().double(), sharded_net()
    (sum(loss(each)(plain(parts[each])) for each in range(2)) / 2).backward()
    step(net, parts[rank], loss=loss(rank), per_rank=True, maximum=3)
    assert differs(net, {name: p.grad for name, p in plain.named_parameters()}) < RTOL


def a_pass_without_gradients_before(rank):
    """It leaves parameters whole."""
    _, wanted = wanted_of(mean)
    for kept in (False, None):
        net = fully_shard(whole().double(), reshard_after_forward=kept)
        with torch.no_grad():
            net(batch_of(rank))
        step(mean(net), batch_of(rank), maximum=4)
        assert differs(net, wanted) < RTOL


def gradients_that_are_divided_by_another_number(rank):
    net, (_, wanted) = sharded_net(), wanted_of(mean)
    for module in (net, *net.blocks):
        module.set_gradient_divide_factor(1.0)
    step(mean(net), batch_of(rank), maximum=4)
    assert differs(net, wanted) < RTOL


# --- what depends on shards themselves


def penalty(net):
    found = 0.0
    for p in net.parameters():
        found = found + (p.full_tensor() if hasattr(p, "full_tensor") else p).square().sum()
    return found


def penalties(rank):
    """Exact after a step, and in a mean that ranks share alike; else refused."""
    net, plain = sharded_net(), whole().double()

    def fn(x):
        return mean(net)(x) + 0.1 * penalty(net)

    (mean(plain)(batch_of(0)) + 0.1 * penalty(plain)).backward()
    step(fn, batch_of(0), maximum=4)
    assert differs(net, {name: p.grad for name, p in plain.named_parameters()}) < RTOL
    net.zero_grad()
    refused(rank, fn, "depends on shards of parameters directly", net)
    refused(rank, fn, "depends on shards of parameters directly", net, loss="sum")
    refused(rank, mean(net), "got once=", net, once=lambda: penalty(net))
    step(mean(net), batch_of(rank), maximum=4)
    # of parts that ranks have the sum is one, too
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    _, wanted = wanted_of(lambda net: lambda x: mean(net)(x) + 0.1 * penalty(net))
    assert differs(net, wanted) < RTOL


# --- refused on all ranks


def settings_that_are_refused(rank):
    net = sharded_net()
    net.blocks[0].set_gradient_divide_factor(1.0)
    refused(rank, mean(net), "divide gradients by 1, 2", net)
    net = sharded_net()
    net.set_requires_gradient_sync(False)
    refused(rank, mean(net), "set_requires_gradient_sync(False)", net)
    net.set_requires_gradient_sync(True)
    step(mean(net), batch_of(rank), maximum=4)
    net = whole().double()
    for block in net.blocks:
        fully_shard(block)
    refused(rank, mean(net), "Call fully_shard() on the root", net)
    for part in (net.words, net.norm, net.head):
        part.requires_grad_(False)
    step(mean(net), batch_of(rank), maximum=4)
    _, wanted = wanted_of(mean)
    assert differs(net, {name: g for name, g in wanted.items() if name[:6] == "blocks"}) < RTOL


class Wrapper:
    """Has a model where no search of its attributes finds it."""

    def __init__(self, net):
        self.__dict__["hidden by another name"] = net

    def __call__(self, x):
        return self.forward_of_all(x)

    def forward_of_all(self, x):
        return vars(self)["hidden by another name"](x)


def arguments_that_are_refused(rank):
    net = sharded_net()
    refused(rank, mean(Wrapper(net)), "runs a sharded module", net)
    step(mean(Wrapper(net)), batch_of(rank), maximum=4, model=net)
    _, wanted = wanted_of(mean)
    assert differs(net, wanted) < RTOL
    net.zero_grad()
    model = net if rank else net.state_dict()
    refused(rank, mean(net), "as model=", net, own=not rank, model=model)
    alike = "(loss='mean', per_rank=True; "
    refused(rank, mean(net), alike, net, per_rank=bool(rank))

    def counted(x):
        each = F.cross_entropy(net(x).flatten(0, 1), x.flatten(), reduction="none")
        return each.sum(), each.numel()

    exchanged = "sharded modules have exchanged gradients by then"
    refused(rank, counted, exchanged, net, per_rank=True)


def ranks_with_too_few_samples(rank):
    net, few, none = sharded_net(), tokens((9, 2)[rank]), None if rank else tokens(9)
    told = r"split into 3 micro-batches on every rank.* one rank has 2 samples"
    with pytest.raises(AdaptiveUsageError, match=told):
        step(mean(net), few, maximum=4)
    with pytest.raises(
        AdaptiveUsageError if rank else RemoteRankError, match="got no samples on rank 1"
    ):
        step(mean(net), none, maximum=4)
    step(mean(net), tokens(4), maximum=4)


# --- sizes and failures


def a_failure_after_all_passes_of_one_rank(rank):
    """Nothing is delivered on either, and the next step goes on."""
    net, n_passes = sharded_net(), []
    _, wanted = wanted_of(mean)

    def backward(loss):
        loss.backward()
        n_passes.append(loss)
        if rank and len(n_passes) == 3:
            raise ValueError("no penalty")

    told = "no penalty" if rank else r"step\('fn'\).* rank 1 \(ValueError: no penalty\)"
    with pytest.raises(ValueError if rank else RemoteRankError, match=told):
        step(mean(net), batch_of(rank), maximum=4, backward=backward)
    assert is_untouched(net)
    step(mean(net), batch_of(rank), maximum=4)
    assert differs(net, wanted) < RTOL


def test_two_ranks_get_the_gradients_of_all_samples_or_an_error():
    run_checks(
        exact_where_padded,
        exact_in_parallel,
        other_losses,
        samples_that_weigh_nothing,
        samples_of_which_none_weighs_anything,
        outputs_that_are_not_used,
        gradients_that_are_divided_by_another_number,
        penalties,
        settings_that_are_refused,
        arguments_that_are_refused,
        ranks_with_too_few_samples,
        a_failure_after_all_passes_of_one_rank,
        timeout=240,
    )


@pytest.mark.slow
def test_two_ranks_plan_and_keep_modules_whole():
    run_checks(
        exact_where_kept_whole,
        exact_with_checkpoints,
        a_pass_without_gradients_before,
        timeout=240,
    )


def models_on_some_ranks(rank):
    """Two models, each on two of four ranks: they name a group beside their own."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    net = whole().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh)
    mine = "sharded over ranks 0, 1, and ranks" if rank < 2 else "sharded over ranks 2, 3, and"
    refused(rank % 2, mean(net), mine, net)
    own = "got a group= in which its sharded modules talk"
    refused(rank % 2, mean(net), own, net, group=mesh.get_group())
    step(mean(net), batch_of(rank % 2), maximum=4, group=groups[rank // 2])
    _, wanted = wanted_of(mean)
    assert differs(net, wanted) < RTOL


def test_models_on_some_ranks_name_a_group_of_these_beside_their_own():
    run_checks(models_on_some_ranks, n=4)


def planned(rank):
    """Under half of what the whole takes, and on one rank less: the sizes, and how often it ran."""
    net, n = sharded(whole()), 32
    x, ran = tokens(n, seed=rank), []

    def fn(x):
        if not isinstance(x, FakeTensor):
            ran.append(len(x))
        return loss_of(net)(x)

    with memory_budget("1GiB") as budget:
        fn(x).backward()
    net.zero_grad()
    ran.clear()
    found = []
    for _ in range(3):
        # a thread of gloo lets go of a gathered weight late where the machine is busy
        with memory_budget(int(budget.peak_bytes * (0.5, 0.38)[rank])) as limited:
            result = step(fn, x)
        found.append([result.micro_batch, result.attempts, ran[:]])
        found[-1].append(limited.peak_bytes)
        ran.clear()
    return found


@pytest.mark.slow
def test_sizes_are_planned_by_the_rank_that_has_the_least_memory():
    first, second = run_ranks(planned, 2, timeout=180)
    for (size, attempts, ran, _), (other, others, also, _) in zip(first, second, strict=True):
        assert size == other < 32
        assert attempts == others == 1
        assert ran == also
        assert sum(ran) == 32
    # what fitted is remembered
    assert len({size for size, *_ in first}) == 1


def fails_everywhere(rank):
    """Runs out of memory above 4 samples, which nobody has predicted; then the next step."""
    net = sharded(whole().double())
    _, wanted = wanted_of(mean)
    x = batch_of(rank)

    def fn(x):
        out = net(x)
        if not isinstance(x, FakeTensor) and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

    found = []
    for _ in range(2):
        with memory_budget("1GiB"):
            try:
                result = step(fn, x)
            except (OutOfRetriesError, RemoteRankError) as error:
                found.append(f"{type(error).__name__}: {error}")
                found.append(all(p.grad is None for p in net.parameters()))
            else:
                return [*found, list(result.sizes), differs(net, wanted)]
    return found


@pytest.mark.slow
def test_the_step_after_one_that_ran_out_plans_for_less():
    first, second = run_ranks(fails_everywhere, 2, timeout=120)
    for text, is_clean, _, error in (first, second):
        assert text.startswith("OutOfRetriesError: 'fn' ran out of")
        assert "predicted were " in text
        assert "that were free of cpu" in text
        assert is_clean
        assert error < RTOL
    assert "on rank 0, in micro-batches of 9 (wanted 1.0 GiB more)" in first[0]
    assert "on rank 1, in micro-batches of 5" in second[0]
    assert max(first[2]) <= 4
    assert len(first[2]) == len(second[2])


def fails_alone(rank, folder):
    """On one rank in the middle of a forward pass: the other waits in the next one."""
    wait_at_most(1.0)
    net = sharded(whole())

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    if rank:
        net.blocks[1].narrow.register_forward_hook(fail)
    started = time.monotonic()
    try:
        step(loss_of(net), tokens(4), maximum=4)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    answer = {"said": said, "seconds": time.monotonic() - started}
    Path(folder, f"answer{rank}").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_hears_of_it_when_that_ends(tmp_path):
    run_ranks(fails_alone, 2, folder=str(tmp_path))
    waiting, failed = (json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2))
    assert failed["said"].startswith("OutOfRetriesError")
    assert "The other ranks could not be told of it" in failed["said"]
    assert waiting["said"].startswith("RemoteRankError: One of 2 ranks has died")
