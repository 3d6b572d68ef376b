"""A plan is what the step then does: it fits, and with a larger micro-batch it doesn't."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    BatchCoupledError,
    OutOfRetriesError,
    memory_budget,
    plan,
    predict_peak,
    statistics,
    step,
)
from tests.true_peak import true_peak_bytes

from ..unchanged import unchanged


def setting(n=64, width=16, depth=2):
    """A model, a batch, and the mean loss."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    batch = {"x": torch.randn(n, width), "y": torch.randint(0, 10, (n,))}
    return model, batch, lambda batch: F.cross_entropy(model(batch["x"]), batch["y"])


def counted_of(model):
    def fn(batch):
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return total, (batch["y"] != -100).sum()

    return fn


def true_bytes(fn, batch, size, **options):
    return true_peak_bytes(lambda: step(fn, batch, maximum=size, verify=False, **options))


@pytest.mark.parametrize("kind", ["mean", "counted", "outputs"])
def test_the_largest_micro_batch_that_fits_is_found(kind):
    model, batch, fn = setting(200, depth=5)
    options, labels = {}, batch["y"]
    if kind == "outputs":
        options["loss"] = lambda outputs: F.cross_entropy(outputs, labels)
        fn = lambda batch: model(batch["x"])  # noqa: E731
    elif kind == "counted":
        fn = counted_of(model)
    whole = plan(fn, batch, "1GiB", margin=0, **options)
    assert whole.sizes == (200,)
    budget = int(whole.peak_bytes * 0.8)
    found = plan(fn, batch, int(budget / 0.9) + 1, margin=0.1, **options)
    assert found.budget_bytes == budget
    base = found.baseline_bytes
    assert base + true_bytes(fn, batch, found.micro_batch, **options) == found.peak_bytes
    assert found.peak_bytes <= budget
    assert step(fn, batch, maximum=found.micro_batch, verify=False, **options).sizes == found.sizes
    model.zero_grad()
    assert base + true_bytes(fn, batch, found.micro_batch + 1, **options) > budget


def test_where_nothing_fits_the_numbers_and_the_size_that_takes_least_are_told():
    _, batch, loss_of = setting(8, 48, 5)
    expected = (
        r"plan\(\) finds no micro-batch of 'fn' that fits: 1 sample at a time would take .* KiB on "
        r"cpu, .* more than the 50\.0 KiB that there are: parameters .*, gradients.*Nothing was run"
    )

    def fn(batch):
        return loss_of(batch)

    with pytest.raises(OutOfRetriesError, match=expected):
        plan(fn, batch, "50KiB", margin=0, maximum=1)
    with pytest.raises(OutOfRetriesError) as caught:
        plan(fn, batch, "50KiB", margin=0)
    size, n_bytes = caught.value.least
    assert (caught.value.sizes, size) == ((8, 3, 2, 1), 8)
    assert plan(fn, batch, n_bytes, margin=0, maximum=size).needed_bytes == n_bytes


def test_a_plan_changes_nothing_and_the_step_of_an_optimizer_counts():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    model[0].weight.grad = torch.ones(8, 8)
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    small, batch = torch.randn(4, 8), torch.randn(40, 8)
    counts = statistics().attempts, statistics().ooms
    fn = lambda x: model(x).square().mean()  # noqa: E731
    with unchanged(model):
        whole = plan(fn, small, "1GiB", optimizer=adam, margin=0)
        without = plan(fn, batch, "1GiB", margin=0)
        with pytest.raises(BatchCoupledError):
            plan(fn, batch, without.peak_bytes - 1, margin=0)
        smaller = plan(fn, batch, without.peak_bytes - 1, margin=0, batchnorm="per_chunk")
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert whole.peak_bytes >= whole.baseline_bytes + 3 * n_bytes
    assert smaller.micro_batch < 40
    assert adam.state == {}
    assert (statistics().attempts, statistics().ooms) == counts


def test_what_piles_up_is_seen_though_the_search_does_not_run_all():
    # each micro-batch of a step of two passes keeps its random state
    model, batch, _ = setting(400, 16, 1)

    def fn(batch):
        total, count = counted_of(model)(batch)
        return {"a": (total, count), "b": (total * 2, count)}

    found = plan(fn, batch, 120_000, margin=0)
    base = found.baseline_bytes
    assert base + true_bytes(fn, batch, found.micro_batch) == found.peak_bytes <= 120_000


@pytest.mark.parametrize("kind", ["mean", "weighted", "two passes", "kept"])
def test_a_long_step_is_planned_from_some_of_its_micro_batches(kind):
    model, batch, loss_of = setting(601)
    kept, options, calls = [], {}, []
    if kind == "weighted":
        options["weight"] = lambda batch: (batch["y"] != 3).sum()
    elif kind == "two passes":
        options["then"] = torch.sqrt

    def fn(batch):
        calls.append(1)
        loss = loss_of(batch)
        if kind == "kept":
            kept.append(loss.detach() * torch.ones(100))
        return loss

    found = plan(fn, batch, "1GiB", maximum=2, **options)
    assert len(calls) < 200
    # a function may leave more behind each time
    assert "in proportion" in found.reasons[0]
    assert found.sizes == step(fn, batch, maximum=2, verify=False, **options).sizes
    kept.clear()
    model.zero_grad()
    real_bytes = found.baseline_bytes + true_bytes(fn, batch, 2, **options)
    assert real_bytes <= found.peak_bytes < 1.1 * real_bytes
    # most need no more time than few do, also where nothing fits
    calls.clear()
    million = {"x": torch.empty(10**6, 16, device="meta"), "y": torch.empty(10**6).long()}
    with pytest.raises(OutOfRetriesError):
        plan(fn, million, "1MiB", **options)
    assert len(calls) < 2000


def test_a_batch_that_is_not_there_is_planned():
    model = nn.Linear(1024, 1024)
    batch = torch.empty(2**20, 1024, device="meta")
    found = plan(lambda x: model(x).square().mean(), batch, "5GiB", margin=0)
    assert 1 < len(found.sizes) < 40
    assert found.peak_bytes <= 5 * 2**30 < found.peak_bytes + 8 * 1024 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "0%"}, "A share goes from above 0% to 100%"),
        ({"margin": 1.0}, "from 0 to below 1"),
        ({"minimum": 9, "maximum": 4}, "Raise it"),
        ({"loss": "avg"}, r"plan\(\) got loss='avg'"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message):
    _, batch, fn = setting()
    with pytest.raises(AdaptiveUsageError, match=message):
        plan(fn, batch, **{"budget": "1GiB"} | arguments)


def test_a_plan_is_shown_and_kept_and_agrees_with_the_prediction_of_the_whole():
    _, batch, fn = setting()
    found = plan(fn, batch, "1GiB", maximum=40)
    assert str(found).startswith("64 samples in 2 micro-batches of up to 40: ")
    again = type(found).from_dict(found.to_dict())
    assert again == found
    assert again.advice == ()
    # a share is of what is free beside what is there
    with memory_budget("300KiB"):
        found = plan(fn, batch, "50%", margin=0)
    assert found.budget_bytes == found.baseline_bytes + 150 * 1024
    whole = plan(fn, batch, "1GiB")
    # the step notes the random state
    noted = torch.get_rng_state().nbytes
    assert 0 <= whole.peak_bytes - predict_peak(fn, batch).peak_bytes <= noted + 256


def test_a_plan_for_an_accelerator_counts_what_its_allocator_reserves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    batch = torch.empty(2**14, 1024, device="meta")
    fn = lambda x: model(x).square().mean()  # noqa: E731
    whole = plan(fn, batch, "1TiB", margin=0, device="cuda")
    assert whole.needed_bytes > whole.peak_bytes
    # there is room for the tensors, and none for what is beside them
    found = plan(fn, batch, whole.peak_bytes, margin=0, device="cuda")
    assert found.device == "cuda"
    assert len(found.sizes) > 1
    assert found.needed_bytes < whole.needed_bytes
