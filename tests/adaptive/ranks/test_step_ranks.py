"""A step on several ranks: all get the gradients of all samples, or all an error; none waits."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import step

from ..step.step_cases import IGNORED, gradients, worst_error
from .launch import run_ranks
from .rank_cases import RTOL, SIZES, Fails, all_samples, joined, net_of


def n_valid(b):
    return (b["y"] != IGNORED).sum()


def ce(o, y, reduction="mean"):
    return F.cross_entropy(o, y, ignore_index=IGNORED, reduction=reduction)


LOSSES = {
    "mean": (lambda net, b: net(b["x"]).square().mean(), None, {}),
    "sum": (lambda net, b: net(b["x"]).square().sum(), None, {"loss": "sum"}),
    "weight": (lambda net, b: ce(net(b["x"]), b["y"]), None, {"weight": n_valid}),
    "pair": (
        lambda net, b: ce(net(b["x"]), b["y"]),
        lambda net, b: (ce(net(b["x"]), b["y"], "sum"), n_valid(b)),
        {},
    ),
    "terms": (
        lambda net, b: net(b["x"]).square().mean() + net(b["x"]).abs().mean(),
        lambda net, b: {"a": net(b["x"]).square().mean(), "b": net(b["x"]).abs().mean()},
        {},
    ),
}


def losses_on(rank, name):
    """The gradients of all samples, while some ranks split, against those of one process."""
    ways = [(most, once) for most in ((None, None), (None, 3), (2, 3)) for once in (False, True)]
    return [losses_of(rank, name, *way) for way in ways]


def losses_of(rank, name, most, once):
    plain, fn, options = LOSSES[name]
    fn = fn or plain
    parts = all_samples(SIZES[: dist.get_world_size()])
    net = net_of()
    extra = (lambda: net[0].weight.square().sum()) if once else None
    whole = plain(net, joined(parts))
    whole = whole + extra() if once else whole
    whole.backward()
    wanted, wanted_loss = gradients(net), float(whole)
    results, allowed = [], most[rank]
    for make in (Replicated, lambda m: m):
        net.zero_grad()
        module = make(net)
        group = None if module is not net else dist.group.WORLD
        fails = Fails(allowed)

        def of(b, module=module, fails=fails):
            fails(b["x"])
            return fn(module, b)

        result = step(of, parts[rank], group=group, once=extra, **options)
        results.append(
            {
                "split": allowed,
                "error": worst_error(gradients(net), wanted),
                "loss": abs(float(result.loss) - wanted_loss) / abs(wanted_loss),
                "terms": 0 if once else abs(sum(map(float, result.terms.values())) - wanted_loss),
                "largest": max(result.sizes),
                "n_samples": result.n_samples,
            }
        )
    return results


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_get_the_gradients_of_all_samples_however_each_splits(name):
    for rank, cases in enumerate(run_ranks(losses_on, name=name)):
        for each in (one for case in cases for one in case):
            assert each["error"] < RTOL
            assert each["loss"] < RTOL
            assert each["terms"] < RTOL
            assert each["n_samples"] == sum(SIZES[:2])
            assert each["largest"] == SIZES[rank] if each["split"] is None else each["largest"] < 4


def per_rank_on(rank, most):
    """Losses that only each rank knows, averaged as DDP does."""
    parts = all_samples(SIZES[:2])
    net = net_of()
    module = Replicated(net)
    found = {}
    for name, fn, options in (
        ("mean", lambda b: module(b["x"]).square().mean(), {}),
        ("then", lambda b: module(b["x"]).square().mean(), {"then": torch.sqrt}),
        ("outputs", lambda b: module(b["x"]), {"loss": lambda o: o.logsumexp(0).sum()}),
    ):
        net.zero_grad()
        loss = fn(parts[rank])
        loss = options.get("then", options.get("loss", lambda each: each))(loss)
        loss.backward()
        wanted = gradients(net)
        net.zero_grad()
        fails = Fails(most if rank else None)
        result = step(
            lambda b, fn=fn, fails=fails: (fails(b["x"]), fn(b))[1],
            parts[rank],
            per_rank=True,
            **options,
        )
        found[name] = worst_error(gradients(net), wanted), float(result.loss - loss.detach())
    return found


@pytest.mark.parametrize("most", [None, 3])
def test_losses_of_each_rank_are_averaged_as_a_replica_does(most):
    for found in run_ranks(per_rank_on, most=most):
        for error, loss_error in found.values():
            assert error < RTOL
            assert abs(loss_error) < RTOL


def failing_on(rank, kind):
    """One rank fails; then all make a step, and a plain one."""
    parts = all_samples(SIZES[:2])
    net = net_of("buffers")
    module = Replicated(net)
    if kind == "out of memory":
        fails = Fails(0 if rank == 1 else None)
    else:
        fails = Fails(0 if rank == 1 else None, ValueError)

    def fn(b):
        fails(b["x"])
        return module(b["x"]).square().mean()

    before = {name: value.clone() for name, value in net.state_dict().items()}
    told = None
    try:
        step(fn, parts[rank], batchnorm="per_chunk")
    except Exception as error:
        told = [type(error).__name__, getattr(error, "rank", None), str(error)]
    clean = all(p.grad is None for p in net.parameters()) and all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )
    # and now all together, by step and without it
    fails.most = None
    errors = []
    for run in (step, lambda f, b: f(b).backward()):
        net.zero_grad()
        run(fn, parts[0])
        got = gradients(net)
        alone = net_of("buffers")
        alone(parts[0]["x"]).square().mean().backward()
        errors.append(worst_error(got, gradients(alone)))
    return {"told": told, "clean": clean, "errors": errors}


@pytest.mark.parametrize("kind", ["out of memory", "another error"])
def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_them_whole(kind):
    found = run_ranks(failing_on, kind=kind)
    raised = "OutOfRetriesError" if kind == "out of memory" else "ValueError"
    assert found[1]["told"][0] == raised
    name, rank, text = found[0]["told"]
    assert (name, rank) == ("RemoteRankError", 1)
    assert f"rank 1 ({'tenure.adaptive.' * (raised[0] == 'O')}{raised}: " in text
    assert "gradients, buffers and random state are as before" in text
    for each in found:
        assert each["clean"]
        assert max(each["errors"]) < RTOL
