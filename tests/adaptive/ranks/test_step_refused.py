"""What a step of several ranks refuses: by name, on all of them, and before anything runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Replicated

from tenure.adaptive import AdaptiveUsageError, RemoteRankError, step

from ..step.step_cases import gradients
from .launch import run_ranks
from .rank_cases import all_samples, net_of, square

hidden = {}


def replica(**options):
    return Replicated(net_of(), **options)


def hooked():
    module = replica()
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return module


def with_builtin_hook():
    module = replica()
    module._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return module


def synchronized():
    # a replica of it is for devices alone
    return nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8)).double()


def post_hooked():
    module = replica()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return module


def joined_step(module):
    with Join([module]):
        try:
            return step(lambda b: square(module, b), all_samples()[0])
        finally:
            # so that the end of the block waits for nobody
            module._join_config = module._join_config._replace(enable=False)


def in_two_groups(module):
    other = replica(process_group=dist.new_group([0, 1]))
    return step(lambda b: square(module, b) + square(other, b), all_samples()[0])


def computed_batch(module):
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    return step(lambda x: module(x).square().mean(), all_samples()[0]["x"] * weight)


def hidden_step(module):
    hidden["module"] = module
    return step(lambda b: square(globals()["hidden"]["module"], b), all_samples()[0])


def hidden_parameter(module):
    hidden["module"] = net_of()

    def fn(b):
        return square(module, b) + square(globals()["hidden"]["module"], b)

    return step(fn, all_samples()[0], group=dist.group.WORLD)


def plain(module, **options):
    fn = (lambda b: module(b["x"])) if "loss" in options else lambda b: square(module, b)
    return step(fn, all_samples()[0], **options)


def two_terms(module):
    def fn(b):
        return {"a": square(module, b), "b": (module(b["x"]).sum(), 7)}

    return step(fn, all_samples()[0])


def many_terms(module):
    step(lambda b: {str(i): square(module, b) for i in range(17)}, all_samples()[0])


def weights_of_terms(module):
    def fn(b):
        return {"a": square(module, b), "b": square(module, b)}

    step(fn, all_samples()[0], weight=lambda b: {"a": 1, "b": len(b["x"])})


def net_in_a_set():
    return nn.ModuleList(net_of() for _ in range(2))


def step_of_a_set(module):
    nets = set(module)

    def fn(b):
        return sum(net(b["x"]).square().mean() for net in nets)

    step(fn, all_samples()[dist.get_rank()], group=dist.group.WORLD)


def models_in_a_set(module):
    def fn(b):
        return sum(net(b["x"]).square().mean() for net in module)

    part = all_samples()[dist.get_rank()]
    step(fn, part, model=set(module), group=dist.group.WORLD)


def with_buffer():
    net = net_of()
    net.register_buffer("cache", torch.zeros(3))
    return Replicated(net)


def other_buffers():
    module = with_buffer()
    module.module.cache = torch.zeros(4 - dist.get_rank())
    return module


def growing(module, part):
    def fn(b):
        module.module.cache = torch.zeros(len(b["x"]))
        return module(b["x"]).square().mean()

    step(fn, part)


def growing_buffers(module):
    growing(module, all_samples()[dist.get_rank()])


def growing_alone(module):
    growing(module, None if dist.get_rank() else all_samples()[0])


CASES = {
    "a comm hook": (hooked, plain, "with a comm hook, which acts while the module runs"),
    "a builtin hook": (with_builtin_hook, plain, "with a comm hook"),
    "a static graph": (lambda: replica(static_graph=True), plain, "with static_graph=True"),
    "SyncBatchNorm": (
        synchronized,
        lambda m: plain(m, group=dist.group.WORLD),
        "SyncBatchNorm in training",
    ),
    "Join": (replica, joined_step, "with a block of torch's Join"),
    "two groups": (replica, in_two_groups, "whose process group is not that of the step"),
    "then=": (replica, lambda m: plain(m, then=torch.sqrt), "got then= a function"),
    "loss=": (replica, lambda m: plain(m, loss=torch.std), "got loss= a function"),
    "a count among terms": (replica, two_terms, "a count with 'b'"),
    "a batch with a graph": (replica, computed_batch, "a batch that was computed with gradients"),
    "a hidden replica": (replica, hidden_step, "that it has not found through its function"),
    "a hidden parameter": (replica, hidden_parameter, "has trained a parameter, float64"),
    "replicas in a set": (net_in_a_set, step_of_a_set, "in a set, nets, whose order is another"),
    "models in a set": (net_in_a_set, models_in_a_set, "in a set, model=, whose order is another"),
    "other buffers": (other_buffers, plain, "1 buffers of 4 elements"),
    "buffers that grow": (with_buffer, growing_buffers, "with buffers of other shapes"),
    "buffers that grow alone": (with_buffer, growing_alone, "with buffers of other shapes"),
    "many terms": (replica, many_terms, "returned 17 terms, and ranks can agree on 16"),
    "weights of terms": (replica, weights_of_terms, "weight() returned {'a': 1, 'b': "),
    "post hooks": (post_hooked, plain, "4 of the parameters have a hook"),
    "a sparse gradient": (
        lambda: Replicated(nn.Embedding(5, 3, sparse=True)),
        lambda m: step(lambda b: m(b).mean(), torch.arange(5)),
        "has a sparse gradient",
    ),
}


def refused_on(rank):
    found = {}
    for name, (make, call, _) in CASES.items():
        module = make()
        try:
            call(module)
            found[name] = None
        except Exception as error:
            found[name] = [type(error).__name__, str(error), not gradients(module)]
    return found


def test_each_is_an_error_by_name_on_all_ranks_and_changes_nothing():
    for found in run_ranks(refused_on):
        for name, (_, _, text) in CASES.items():
            assert found[name], name
            kind, told, is_clean = found[name]
            assert (name, kind, is_clean) == (name, "AdaptiveUsageError", True)
            assert text in told


def no_member_on(rank):
    group = dist.new_group([0])
    module = net_of()
    try:
        result = step(lambda b: square(module, b), all_samples()[0], group=group)
        return len(result.sizes)
    except Exception as error:
        return str(error)


def test_a_group_without_this_rank_is_refused_and_one_of_it_alone_is_local():
    alone, text = run_ranks(no_member_on)
    assert alone == 1
    assert "a group= that this process, rank 1 of all, is no member of" in text


def frozen_on(rank):
    """SyncBatchNorm that is frozen, and a group of one process for each replica, pass."""
    plain(synchronized().eval(), group=dist.group.WORLD)
    groups = [dist.new_group([each]) for each in range(2)]
    module = Replicated(net_of(), process_group=groups[rank])
    if rank:
        plain(module, maximum=3)
    return True


def test_frozen_statistics_and_groups_of_one_pass():
    assert run_ranks(frozen_on) == [True, True]


@pytest.mark.parametrize("group", [None, "anything"])
def test_a_process_alone_asks_for_no_group(group):
    net = net_of()
    assert (
        step(lambda b: square(net, b), all_samples()[0], group=group, per_rank=True).n_samples == 9
    )


# --- terms that ranks don't have alike


def loss_without_labels(rank, module, b):
    total = module(b["x"]).square().sum()
    return total * 0.0 if rank else (total, len(b["x"]))


def loss_of_other_names(rank, module, b):
    value = module(b["x"]).square().mean()
    return {"a": value} if rank else {"b": value}


def loss_in_another_order(rank, module, b):
    value = module(b["x"]).square().mean()
    return {"a": value, "b": 2 * value} if rank else {"b": 2 * value, "a": value}


def unlike_on(rank, name):
    module = replica()
    batch = all_samples()[rank]
    try:
        step(lambda b: globals()[name](rank, module, b), batch)
    except AdaptiveUsageError as error:
        return str(error), all(p.grad is None for p in module.parameters())
    return None


@pytest.mark.parametrize(
    "name", ["loss_without_labels", "loss_of_other_names", "loss_in_another_order"]
)
def test_terms_that_ranks_do_not_have_alike_are_refused_on_all(name):
    for text, is_untouched in run_ranks(unlike_on, name=name):
        assert "other terms on one rank than on another" in text
        assert is_untouched


class SilentError(Exception):
    def __str__(self):
        raise AttributeError("no text")


def without_text_on(rank):
    module = replica()

    def loss_of(b):
        if rank:
            raise SilentError
        return square(module, b)

    try:
        step(loss_of, all_samples()[rank])
    except SilentError:
        return "its own"
    except RemoteRankError as error:
        return error.cause
    return None


def test_an_error_whose_text_fails_is_told_all_the_same():
    cause, own = run_ranks(without_text_on)
    assert own == "its own"
    assert "SilentError" in cause
