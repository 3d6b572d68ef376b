"""The size that the first step under a budget comes to, and those after it."""

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, OutOfRetriesError, memory_budget, step

pytestmark = pytest.mark.usefixtures("forgetful")


def network(*middle):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), *middle) for _ in range(4)]
    return nn.Sequential(*layers)


def squares(net):
    return lambda b: net(b).square().mean()


def peak_of(net, x):
    with memory_budget(1 << 40) as budget:
        net(x).square().mean().backward()
    net.zero_grad()
    return budget.peak_bytes


@pytest.mark.parametrize("share", [0.15, 0.9])
def test_the_first_step_comes_to_95_percent_of_what_fits_with_three_failures(share):
    net, x, events = network(), torch.randn(400, 32), []
    budget_bytes = int(peak_of(net, x) * share)
    with memory_budget(budget_bytes):
        result = step(squares(net), x)
    assert result.attempts <= 4
    size = int(result.micro_batch / 0.95) + 1
    net.zero_grad()
    with memory_budget(budget_bytes):
        options = {"maximum": size, "cache_type": NoBatchsizeCache}
        step(squares(net), x, on_retry=events.append, **options)
    assert events


def test_state_of_an_optimizer_that_takes_the_memory_is_no_reason_to_fail_again():
    net, x = network(), torch.randn(1000, 32)
    optimizer = torch.optim.Adam(net.parameters())
    events, sizes = [], []
    with memory_budget(peak_of(net, x) // 3):
        for _ in range(10):
            result = step(squares(net), x, on_retry=events.append)
            sizes.append(result.micro_batch)
            optimizer.step()
            optimizer.zero_grad()
    assert sum(event.kind == "shrink" for event in events) <= 3
    assert len(set(sizes[3:])) == 1


@pytest.mark.parametrize(
    ("n_samples", "limit", "set_to_none"), [(500, 1400, True), (400, 1200, False)]
)
def test_gradients_that_are_added_to_are_no_reason_to_fail_again(n_samples, limit, set_to_none):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    net = nn.Sequential(*layers)
    batch = torch.rand(n_samples, 64), torch.randint(10, (n_samples,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    events, sizes = [], {True: [], False: []}

    def fn(b):
        return nn.functional.cross_entropy(net(b[0]), b[1])

    with memory_budget(limit << 10):
        # an epoch of an odd number of batches, of which every second one is followed by an update
        for i in (i for _ in range(8) for i in range(3)):
            adds = net[0].weight.grad is not None
            sizes[adds].append(step(fn, batch, on_retry=events.append).micro_batch)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    assert sum(event.kind == "shrink" for event in events) <= 3
    # each comes to a size of its own, and stays there
    assert all(len(set(each[-5:])) == 1 for each in sizes.values() if len(each) > 5)


def test_what_is_tried_out_leaves_no_trace():
    net, x, seen = network(nn.BatchNorm1d(32), nn.Dropout()), torch.randn(256, 32), []
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def fn(b):
        seen.append(len(b))
        return net(b).square().mean()

    def outcome(**options):
        net.load_state_dict(before, strict=False)
        net.zero_grad()
        torch.manual_seed(3)
        result = step(fn, x, batchnorm="per_chunk", **options)
        state = [*(p.grad for p in net.parameters()), *net.buffers()]
        return result, [*map(torch.clone, state), torch.get_rng_state()]

    with memory_budget(peak_of(net, x) // 3):
        result, state = outcome()
    n_tried = len(seen) - len(result.sizes)
    assert n_tried > 2  # the whole, and pairs of one micro-batch
    assert result.micro_batch > seen[1]
    _, wanted = outcome(maximum=result.micro_batch, cache_type=NoBatchsizeCache)
    assert all(map(torch.equal, state, wanted))


def test_outputs_that_pile_up_beside_a_micro_batch_make_it_smaller_still():
    net, x = network(), torch.randn(400, 32)
    with memory_budget(1 << 40) as whole:
        step(net, x, loss=lambda o: o.logsumexp(0).sum())
    net.zero_grad()
    with memory_budget(int(whole.peak_bytes * 0.8)):
        result = step(net, x, loss=lambda o: o.logsumexp(0).sum())
    assert len(result.sizes) > 1
    assert result.attempts <= 4


def test_where_nothing_fitted_the_next_call_begins_as_if_nothing_were_known():
    """Not with single samples: how little memory there was says nothing of what there is now."""
    net, x = network(), torch.randn(400, 32)
    peak_bytes = peak_of(net, x)

    def run(budget_bytes):
        net.zero_grad()
        with memory_budget(budget_bytes):
            return step(squares(net), x)

    with pytest.raises(OutOfRetriesError):
        run(12 << 10)
    assert run(2 * peak_bytes).sizes == (400,)
    assert run(int(0.6 * peak_bytes)).micro_batch >= 100
    with pytest.raises(OutOfRetriesError):
        run(12 << 10)
    assert run(int(0.6 * peak_bytes)).micro_batch >= 100
