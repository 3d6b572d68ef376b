"""Two moments and what lies between them: exact, signed, by name; and what looks like a leak."""

import gc
import json

import pytest
import torch
from torch import nn

from tenure.profiler import Finding, ProfilerUsageError, Snapshot, SnapshotDiff, TensorRow, snapshot

HISTORY = []
HERE = __name__


class Box:
    """Anything with attributes."""


@pytest.fixture(autouse=True)
def _no_garbage():
    gc.collect()
    yield
    HISTORY.clear()


def test_what_came_grew_and_went_is_named_with_its_sign():
    HISTORY.append(torch.ones(256))
    before = snapshot()
    assert not snapshot().diff(before)
    HISTORY[0] = torch.ones(512)
    HISTORY.append(HISTORY[0][:3])
    after = snapshot()
    change = after.diff(before)
    assert [(row.name, row.n_bytes) for row in change.new] == [(f"{HERE}.HISTORY[0]", 2048)]
    assert [(row.name, row.n_bytes) for row in change.freed] == [(f"{HERE}.HISTORY[0]", 1024)]
    assert (change.total_bytes, before.diff(after).total_bytes) == (1024, -1024)
    HISTORY.extend(torch.ones(256) for _ in range(3))
    (finding,) = snapshot().diff(after).findings
    assert finding == Finding(
        "growth", f"{HERE}.HISTORY[…]", f"{HERE}.HISTORY[…] grew by 3 tensors, 3.0 KiB", 3072
    )
    assert str(finding).endswith("Bound it, or keep numbers instead of tensors.")


def test_a_new_storage_at_an_old_address_is_new():
    HISTORY.append(torch.ones(64))
    before = snapshot()
    address = HISTORY[0].untyped_storage()._cdata
    HISTORY.clear()
    others = []
    while (made := torch.ones(64)).untyped_storage()._cdata != address:
        others.append(made)
        assert len(others) < 10_000
    others.clear()
    HISTORY.append(made)
    change = snapshot().diff(before)
    assert (len(change.new), len(change.freed), change.total_bytes) == (1, 1, 0)


def test_a_storage_that_grew_in_place_is_the_same_one():
    HISTORY.append(torch.ones(64))
    before = snapshot()
    HISTORY[0].resize_(256)
    change = snapshot().diff(before)
    assert (change.new, change.freed) == ((), ())
    ((was, row),) = change.resized
    assert (was.n_bytes, row.n_bytes, change.total_bytes) == (256, 1024, 768)


def test_a_storage_that_no_tensor_shows_counts_if_it_has_memory():
    before = snapshot()
    HISTORY.append(torch.empty(256).untyped_storage())
    HISTORY.append(torch.empty(256, device="meta").untyped_storage())
    assert snapshot().diff(before).total_bytes == 1024


def test_on_a_device_the_change_is_that_of_the_allocator(sim):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to(sim.device)
    x, start = torch.randn(4, 8).to(sim.device), sim.allocated_bytes
    rounded_before = start - sim.requested_bytes
    before = snapshot()
    loss = model(x).square().sum()
    now = snapshot()
    change, told = now.diff(before), {each.device: each.total_bytes for each in now.report.devices}
    assert told[str(sim.device)] == sim.allocated_bytes
    rounded_bytes = sim.allocated_bytes - sim.requested_bytes - rounded_before
    assert change.unexplained_bytes == rounded_bytes
    assert loss.requires_grad


def test_losses_that_keep_their_graphs_are_found_with_what_these_saved():
    net, losses = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), []
    before = snapshot()
    for _ in range(3):
        out = net(torch.ones(32, 64))
        losses.append(out.square().mean())
    change = snapshot().diff(before)
    saved = [row for row in change.new if row.category == "saved for backward"]
    here = "test_losses_that_keep_their_graphs_are_found_with_what_these_saved.<locals>"
    # `out` has a graph of its own, a part of the last loss's
    assert {row.graph for row in saved} == {f"{here}.losses[{i}]" for i in range(3)}
    assert f"AddmmBackward0.mat1 and 1 more in the graph of {here}.losses[1]" in change.text(
        width=400
    )
    (graphs, growth) = change.findings
    assert (graphs.kind, growth.kind) == ("graph", "growth")
    assert graphs.what == f"{here}.losses[…]"
    assert graphs.n_bytes == sum(row.n_bytes for row in saved)
    assert f"with {len(saved)} storages, " in str(graphs)
    assert ". Call backward(), or keep loss.detach()" in str(graphs)


# findings


def test_a_small_view_of_a_large_storage_is_found():
    before = snapshot()
    HISTORY.append(torch.ones(4096)[:1])
    change = snapshot().diff(before)
    (finding,) = change.findings
    assert finding.kind == "view"
    assert finding.text == f"{HERE}.HISTORY[0] shows 4 B and keeps 16.0 KiB alive"
    assert finding.n_bytes == 16_380
    assert finding in snapshot().findings
    base = torch.ones(4096)
    before = snapshot()
    # a view beside its base, or of little, is no finding
    HISTORY.extend([base[:1], torch.ones(100)[:1], torch.ones(4096)[:3000]])
    assert "view" not in {each.kind for each in snapshot().diff(before).findings}


def test_a_cycle_that_waits_for_the_collector_is_found():
    gc.disable()
    try:
        before = snapshot()
        box = Box()
        box.me, box.t = box, torch.ones(2048)
        del box
        (finding,) = snapshot().diff(before).findings
    finally:
        gc.enable()
    assert (finding.kind, finding.n_bytes) == ("cycle", 8192)
    assert finding.what == "Box.t, in a reference cycle"
    assert "gc.collect() frees it" in str(finding)


def test_a_model_in_a_cycle_is_found_with_its_gradients_and_optimizer_state():
    def train():
        trainer, shared = Box(), nn.Linear(8, 8)
        trainer.net = nn.Sequential(shared, nn.Linear(8, 8))
        trainer.net.trainer = trainer
        trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), momentum=0.9)
        trainer.net(torch.ones(8)).sum().backward()
        trainer.optimizer.step()
        return shared, trainer.net[1].weight.detach()

    train()  # the first optimizer imports much
    gc.collect()
    gc.disable()
    try:
        before = snapshot()
        shared, values = train()
        change = snapshot().diff(before)
    finally:
        gc.enable()
    (finding,) = change.findings
    # the parameters and gradients of one layer, less the values in use, and the momentum of both
    assert (finding.kind, finding.n_bytes) == ("cycle", (8 * 8 + 8) * 4 * 4 - values.nbytes)
    assert finding.what == "Box, in a reference cycle"
    names = {row.name for row in change.new}
    assert {"Box.net.1.bias", "Box.net.1.weight.grad"} <= names
    assert any("optimizer" in name and name.endswith(".momentum_buffer") for name in names)
    # a live module's parameters are no garbage
    assert shared.weight.grad is not None


# what it says

DIFF = SnapshotDiff(
    1536,
    (
        TensorRow("f.<locals>.x", "other tensors", (256,), "float32", "cpu", 1024, None, "a.py:3"),
        TensorRow("h[0]", "other tensors", (), "float32", "cpu", 4),
    ),
    (TensorRow("old", "gradients", (2, 3), "float16", "cuda:0", 12),),
    ((TensorRow("r", "other tensors", (1,), "uint8", "cpu", 1),
      TensorRow("r", "other tensors", (9,), "uint8", "cpu", 9)),),
    (Finding("growth", "h[…]", "h[…] grew by 2 tensors, 8 B", 8),),
)  # fmt: skip

TEXT = """\
+1.5 KiB: 2 new and 1 freed storages, +512 B unexplained
- h[…] grew by 2 tensors, 8 B. Bound it, or keep numbers instead of tensors.
held by       change    storage  tensor                   created at
------------  -------  --------  -----------------------  ----------
f.<locals>.x  new      +1.0 KiB  float32[256] on cpu      a.py:3
old           freed       -12 B  float16[2, 3] on cuda:0
r             resized      +8 B  uint8[9] on cpu
h[0]          new          +4 B  float32[] on cpu"""


def test_the_printed_difference_and_its_dictionary():
    assert str(DIFF) == TEXT
    data = json.loads(json.dumps(DIFF.to_dict()))
    changed = sum(data["categories"].values())
    assert data["total_bytes"] == changed + data["unexplained_bytes"] == 1536
    assert data["findings"][0]["kind"] == "growth"
    assert repr(DIFF) == f"<SnapshotDiff of {TEXT.splitlines()[0]}>"


def test_what_is_no_snapshot_and_one_that_was_read_are_not_compared():
    with pytest.raises(ProfilerUsageError, match=r"wants the earlier Snapshot, and got int"):
        snapshot().diff(3)
    HISTORY.append(torch.ones(64, requires_grad=True).exp().sin())
    HISTORY.append(torch.ones(4096)[:1])
    taken = snapshot()
    read = Snapshot.from_dict(json.loads(json.dumps(taken.to_dict())))
    assert (read.records, read.findings) == (taken.records, taken.findings)
    assert str(read) == str(taken)
    assert read.findings
    assert f"{HERE}.HISTORY[0]" in {row.graph for row in read.records}
    for one, other in ((taken, read), (read, taken)):
        with pytest.raises(ProfilerUsageError, match=r"no longer knows.*`tenure diff A B`"):
            one.diff(other)
