"""Sharded modules as users set them: what is exact all the same, and what all ranks refuse."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, RemoteRankError, step

from .launch import run_ranks
from .sharded_nets import sharded, wait_at_most, whole, whole_gradients
from .test_step_sharded import RTOL, batch_of, differs, mean, wanted_of


def said_by(work):
    """What a step that is refused says, or what it gave."""
    try:
        return work()
    except (AdaptiveUsageError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"


def are_refused(found, *texts):
    for said, is_untouched in found:
        assert said.startswith("AdaptiveUsageError")
        for text in texts:
            assert text in said
        assert is_untouched


def is_untouched(net):
    return all(p.grad is None for p in net.parameters())


# --- parameters that are whole when a step begins


def after_evaluation(rank, kept):
    """A step after a pass without gradients, which leaves parameters whole."""
    found = []
    _, wanted = wanted_of(mean)
    for is_root_alone in (False, True):
        net = whole().double()
        if is_root_alone:
            fully_shard(net, reshard_after_forward=kept)
        else:
            sharded(net, reshard_after_forward=kept)
        for _ in range(2):
            net.zero_grad()
            with torch.no_grad():
                net(batch_of(rank))
            step(mean(net), batch_of(rank), maximum=4)
            found.append(differs(net, wanted))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, None])
def test_a_step_after_an_evaluation_knows_that_its_modules_are_sharded(kept):
    for found in run_ranks(after_evaluation, 2, kept=kept):
        assert len(found) == 4
        assert max(found) < RTOL


# --- what depends on shards themselves


def penalty(net):
    found = 0.0
    for p in net.parameters():
        found = found + (p.full_tensor() if hasattr(p, "full_tensor") else p).square().sum()
    return found


def penalties(rank, is_alike):
    """A penalty in the loss, or run backward after the step."""
    net, x = sharded(whole().double()), batch_of(0 if is_alike else rank)

    def fn(x):
        return mean(net)(x) + 0.1 * penalty(net)

    said = said_by(lambda: float(step(fn, x, maximum=4).loss))
    in_loss = said, is_untouched(net) or whole_gradients(net)["head.weight"].tolist()
    net.zero_grad()
    step(mean(net), x, maximum=4)
    # of parts that ranks have the sum is one, too
    (0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    plain, samples = whole().double(), [batch_of(each) for each in range(2)]
    loss = mean(plain)(x if is_alike else torch.cat(samples)) + 0.1 * penalty(plain)
    loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    return *in_loss, float(loss), wanted["head.weight"].tolist(), differs(net, wanted)


def test_a_penalty_on_shards_is_exact_after_a_step_and_in_a_mean_that_ranks_share_alike():
    for loss, gradient, wanted_loss, wanted, error in run_ranks(penalties, 2, is_alike=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-9)
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(wanted))
        assert error < RTOL


def test_a_penalty_on_shards_in_a_mean_that_ranks_share_unlike_is_refused():
    found = run_ranks(penalties, 2, is_alike=False)
    are_refused([each[:2] for each in found], "depends on shards of parameters directly")
    assert all(each[-1] < RTOL for each in found)


def penalty_of_unknown_scale(rank, how):
    net, x = sharded(whole().double()), batch_of(rank)

    def fn(x):
        return mean(net)(x) + 0.1 * penalty(net)

    options = {"loss": "sum"} if how == "a sum" else {"weight": lambda _: 1 - rank}
    if how == "once":
        fn, options = mean(net), {"once": lambda: penalty(net)}
    return said_by(lambda: step(fn, x, maximum=9, **options)), is_untouched(net)


@pytest.mark.parametrize("how", ["a sum", "once"])
def test_a_penalty_on_shards_that_is_added_to_a_sum_or_once_is_refused(how):
    found = run_ranks(penalty_of_unknown_scale, 2, how=how)
    told = "depends on shards of parameters directly" if how == "a sum" else "got once="
    are_refused(found, told, "un backward from", "after step(), on every rank")


def test_a_penalty_on_shards_beside_samples_that_weigh_nothing_is_refused():
    (other, clean), (own, also) = run_ranks(penalty_of_unknown_scale, 2, how="no weight")
    assert "depends on shards of parameters directly" in own
    assert other.startswith(("RemoteRankError", "AdaptiveUsageError"))
    assert clean
    assert also


# --- settings


def divided(rank, where):
    """Another factor to divide gradients by, of all modules or of one."""
    net, x = sharded(whole().double()), batch_of(rank)
    for module in (net, *net.blocks) if where == "all" else net.blocks[:1]:
        module.set_gradient_divide_factor(1.0)

    said = said_by(lambda: [step(mean(net), x, maximum=4)] and "done")
    if where == "one":
        return said, is_untouched(net)

    _, wanted = wanted_of(mean)
    return said, differs(net, wanted)


def test_gradients_that_are_divided_by_another_number_are_exact():
    for said, error in run_ranks(divided, 2, where="all"):
        assert said == "done"
        assert error < RTOL


def test_modules_that_divide_gradients_by_different_numbers_are_refused():
    found = run_ranks(divided, 2, where="one")
    are_refused(found, "divide gradients by 1, 2", "set_gradient_divide_factor()")


class Wrapper:
    """Has a model where no search of its attributes finds it."""

    def __init__(self, net):
        self.__dict__["hidden by another name"] = net

    def __getattr__(self, name):
        return getattr(self.__dict__["hidden by another name"], name)

    def __call__(self, x):
        return self.forward_of_all(x)

    def forward_of_all(self, x):
        return vars(self)["hidden by another name"](x)


def hidden(rank):
    net = sharded(whole().double())
    wrapper = Wrapper(net)
    said = said_by(lambda: step(mean(wrapper), batch_of(rank), maximum=9))
    clean = is_untouched(net)
    _, wanted = wanted_of(mean)
    step(mean(wrapper), batch_of(rank), maximum=4, model=net)
    return said, clean, differs(net, wanted)


def test_sharded_modules_that_no_search_finds_are_refused_until_they_are_named():
    found = run_ranks(hidden, 2)
    are_refused([each[:2] for each in found], "runs a sharded module", "model=")
    assert all(each[2] < RTOL for each in found)


def without_root(rank, is_frozen):
    net = whole().double()
    for block in net.blocks:
        fully_shard(block)
    if is_frozen:
        for part in (net.words, net.norm, net.head):
            part.requires_grad_(False)
    said = said_by(lambda: [step(mean(net), batch_of(rank), maximum=4)] and "done")
    _, wanted = wanted_of(mean)
    if not is_frozen:
        return said, is_untouched(net)
    blocks = {name: g for name, g in wanted.items() if name.startswith("blocks.")}
    return said, differs(net, blocks)


def test_a_model_whose_root_is_not_sharded_is_refused_if_that_is_trained():
    found = run_ranks(without_root, 2, is_frozen=False)
    are_refused(found, "which is not sharded", "Call fully_shard() on the root")
    for said, error in run_ranks(without_root, 2, is_frozen=True):
        assert said == "done"
        assert error < RTOL


def without_exchange(rank):
    net = sharded(whole().double())
    net.set_requires_gradient_sync(False)
    said = said_by(lambda: step(mean(net), batch_of(rank), maximum=4))
    net.set_requires_gradient_sync(True)
    _, wanted = wanted_of(mean)
    clean = is_untouched(net)
    step(mean(net), batch_of(rank), maximum=4)
    return said, clean, differs(net, wanted)


def test_modules_that_were_told_to_exchange_nothing_are_refused_at_once():
    found = run_ranks(without_exchange, 2)
    are_refused([each[:2] for each in found], "set_requires_gradient_sync(False)")
    assert all(each[2] < RTOL for each in found)


# --- groups


def halves(rank):
    """Two models, each on two of four ranks."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    net = whole().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh)
    x = batch_of(rank % 2)
    alone = said_by(lambda: step(mean(net), x, maximum=4))
    in_their_own = said_by(lambda: step(mean(net), x, maximum=4, group=mesh.get_group()))
    clean = is_untouched(net)
    step(mean(net), x, maximum=4, group=groups[rank // 2])
    _, wanted = wanted_of(mean)
    return alone, in_their_own, clean, differs(net, wanted)


def test_models_on_some_ranks_name_a_group_of_these_beside_their_own():
    for rank, (alone, own, clean, error) in enumerate(run_ranks(halves, 4, timeout=120)):
        mine = "0, 1" if rank < 2 else "2, 3"
        assert f"sharded over ranks {mine}, and ranks 0, 1, 2, 3 would make" in alone
        assert "got a group= in which its sharded modules talk" in own
        assert clean
        assert error < RTOL


def runs_out_later(rank):
    """Runs out of memory on both ranks, on one of them when the other has given up waiting."""
    wait_at_most(0.5)
    net, x, said = sharded(whole().double()), batch_of(rank), []
    n_passes = []

    def backward(loss):
        loss.backward()
        n_passes.append(loss)
        if len(n_passes) == 3:
            time.sleep(2.0 * rank)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    try:
        step(mean(net), x, maximum=4, backward=backward)
    except OutOfRetriesError as error:
        said = getattr(error, "__notes__", [])
    step(mean(net), x, maximum=4, backward=backward)
    _, wanted = wanted_of(mean)
    return said, differs(net, wanted)


@pytest.mark.slow
def test_ranks_that_ran_out_at_other_times_go_on():
    for said, error in run_ranks(runs_out_later, 2):
        assert "could not be told" in str(said)
        assert error < RTOL


# --- arguments


def wrong_model(rank):
    net = sharded(whole().double())
    model = net if rank else net.state_dict()
    said = said_by(lambda: step(mean(net), batch_of(rank), maximum=4, model=model))
    _, wanted = wanted_of(mean)
    step(mean(net), batch_of(rank), maximum=4)
    return said, differs(net, wanted)


def test_a_model_that_is_none_on_one_rank_is_told_to_the_others():
    (own, error), (other, also) = run_ranks(wrong_model, 2)
    assert "AdaptiveUsageError: step() got a" in own
    assert "as model=" in own
    assert other.startswith("RemoteRankError")
    assert error < RTOL
    assert also < RTOL


def unlike(rank, how):
    """Arguments that ranks don't have alike, and results."""
    net = sharded(whole().double())
    options, fn = {"per_rank": bool(rank)}, mean(net)
    if how == "weights":
        options = {"weight": lambda x: {"words": len(x)}}
    elif how == "terms":
        options, fn = {}, lambda x: {f"words{rank}": mean(net)(x)}
    said = said_by(lambda: step(fn, batch_of(rank), maximum=4, **options))
    return said, is_untouched(net)


def test_arguments_that_ranks_do_not_have_alike_are_told_by_name_on_all():
    found = run_ranks(unlike, 2, how="kinds")
    are_refused(found, "(loss='mean'; ", ") on rank 0, step(", "(loss='mean', per_rank=True; ")


@pytest.mark.parametrize(
    ("how", "told"),
    [("weights", "weight() returned {'words': "), ("terms", "returned other terms on one")],
)
def test_weights_of_terms_and_terms_of_other_names_are_refused_on_all(how, told):
    are_refused(run_ranks(unlike, 2, how=how), told)
