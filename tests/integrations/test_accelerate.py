"""A loop of accelerate, by the real package, with `step` in the place of forward and backward."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tenure.adaptive import AdaptiveUsageError, memory_budget
from tenure.integrations.accelerate import step

accelerate = pytest.importorskip("accelerate")
state = pytest.importorskip("accelerate.state")
# before accelerate 1.1
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerators of one process share their state."""
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def network(width=8, depth=1, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), *hidden, nn.Linear(width, 10)).to(dtype)


def data(n, dtype=torch.float64):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, 16, dtype=dtype), torch.randint(10, (n,)))


class Loop:
    """A training loop; with options of `step`, that runs forward and backward."""

    def __init__(self, dataset, batch_size, *, options=None, make=network, scaler=None, **settings):
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        # accelerate has one where there is an accelerator, and none on the CPU
        self.accelerator.scaler = scaler and scaler()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
        loader = DataLoader(dataset, batch_size=batch_size)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.options = options
        self.sizes, self.told, self.numbers = (), [], []

    def loss_of(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def run_batch(self, batch):
        if self.options is None:
            loss = self.loss_of(batch)
            self.accelerator.backward(loss)
            return loss.item()
        result = step(self.accelerator, self.loss_of, batch, **self.options)
        self.sizes = result.sizes
        return result.loss.item()

    def train_on(self, batch):
        with self.accelerator.accumulate(self.model):
            loss = self.run_batch(batch)
            # which counts for no budget
            gradients = [p.grad.numpy().copy() for p in self.model.parameters()]
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        skipped = self.accelerator.optimizer_step_was_skipped
        self.told.append((self.accelerator.sync_gradients, skipped))
        self.numbers.append((loss, gradients, self.scheduler.get_last_lr()))

    def run(self, n_epochs):
        for _ in range(n_epochs):
            for batch in self.loader:
                self.train_on(batch)
        return self


def compared(dataset, batch_size, n_epochs, *, options, **settings):
    """After each batch, losses, gradients and schedules are those of the plain loop."""
    plain = Loop(dataset, batch_size, **settings).run(n_epochs)
    ours = Loop(dataset, batch_size, options=options, **settings).run(n_epochs)
    assert_same(ours, plain)
    assert max(ours.sizes) == options["maximum"]
    return ours, plain


def assert_same(ours, plain, rtol=1e-10, atol=1e-14):
    assert ours.told == plain.told
    torch.testing.assert_close(ours.numbers, plain.numbers, rtol=rtol, atol=atol, equal_nan=True)
    parameters = [[*loop.model.parameters()] for loop in (ours, plain)]
    torch.testing.assert_close(*parameters, rtol=0, atol=1e-6)


def test_a_loop_in_a_third_of_its_memory_trains_the_same_model(events):
    settings = {"batch_size": 1024, "gradient_accumulation_steps": 2}
    settings["make"] = lambda: network(32, 8)
    dataset = data(3 * 1024 + 100)
    with memory_budget("1GiB") as needed:
        plain = Loop(dataset, **settings).run(4)
    events.clear()
    with memory_budget(needed.peak_bytes // 3):
        ours = Loop(dataset, options={}, **settings).run(4)
    assert_same(ours, plain, rtol=1e-9, atol=1e-9)
    # it did run out of memory
    n_failures = sum(event.kind in ("retry", "shrink") for event in events)
    assert 1 <= n_failures <= 3


@pytest.mark.parametrize("sync_with_dataloader", [True, False])
def test_gradients_are_accumulated_as_by_the_plain_loop(sync_with_dataloader):
    plugin = accelerate.utils.GradientAccumulationPlugin(
        num_steps=3, sync_with_dataloader=sync_with_dataloader
    )
    options = {"maximum": 3}
    _, plain = compared(data(8 * 7), 8, 2, options=options, gradient_accumulation_plugin=plugin)
    assert {synced for synced, _ in plain.told} == {True, False}


def test_a_scaler_scales_once_and_skips_what_overflows():
    dataset = data(64 * 6)
    dataset.tensors[0][64 * 2] = float("inf")
    settings = {"options": {"verify": False, "maximum": 20}, "gradient_accumulation_steps": 2}
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**14, growth_interval=1)
    ours, plain = compared(dataset, 64, 3, scaler=scaler, **settings)
    assert {skipped for _, skipped in plain.told} == {True, False}
    assert ours.accelerator.scaler.get_scale() == plain.accelerator.scaler.get_scale()


def test_a_dispatched_model_trains_the_same():
    def dispatched():
        net = network()
        device_map = {name: "cpu" for name, _ in net.named_children()}
        return accelerate.dispatch_model(net, device_map, main_device="cpu", force_hooks=True)

    ours, _ = compared(data(12), 12, 2, options={"maximum": 5}, make=dispatched)
    assert hasattr(ours.model[0], "_hf_hook")


def test_the_reported_loss_is_not_divided_and_nothing_of_the_accelerator_changes():
    loop = Loop(data(8), 8, options={"maximum": 3}, gradient_accumulation_steps=4)
    (batch,) = loop.loader
    accelerator, shared = loop.accelerator, state.GradientState()
    with accelerator.accumulate(loop.model):
        before = dict(vars(accelerator)), dict(vars(shared)), list(accelerator._models)
        loss = loop.run_batch(batch)
        after = dict(vars(accelerator)), dict(vars(shared)), list(accelerator._models)
    assert after == before
    assert loop.sizes == (3, 3, 2)
    assert loss == pytest.approx(loop.loss_of(batch).item(), rel=1e-6)


def test_bfloat16_gives_what_the_micro_batches_give_by_hand():
    x, y = data(12, torch.float32).tensors
    gradients = []
    for is_by_hand in (False, True):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(network(32, 4, torch.float32))

        def loss_of(batch, reduction="mean", model=model):
            out = model(batch[0])
            # the model computes in bfloat16, and hands on float32
            assert out.dtype is torch.float32
            return F.cross_entropy(out, batch[1], reduction=reduction)

        if is_by_hand:
            for part in (slice(0, 5), slice(5, 10), slice(10, 12)):
                accelerator.backward(loss_of((x[part], y[part]), "sum") / 12)
        else:
            step(accelerator, loss_of, (x, y), maximum=5)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"distributed_type": accelerate.DistributedType.DEEPSPEED}, "DEEPSPEED, whose backward"),
        ({"has_lomo_optimizer": True}, "a LOMO optimizer"),
        ({"mixed_precision": "fp8"}, "fp8, whose scales"),
        ({"parallelism_config": {"tp_size": 2}}, "tensor parallelism, whose ranks"),
    ],
)
def test_what_can_not_be_taken_back_is_refused_by_name(setting, what):
    if sizes := setting.get("parallelism_config"):
        if not hasattr(accelerate, "ParallelismConfig"):
            pytest.skip("this accelerate has no ParallelismConfig")
        setting = {"parallelism_config": accelerate.ParallelismConfig(**sizes)}
    accelerator = accelerate.Accelerator(cpu=True)
    known = {"distributed_type": accelerator.distributed_type, "backward": accelerator.backward}
    fake = SimpleNamespace(**(known | setting))
    with pytest.raises(AdaptiveUsageError, match=rf"^step\(\) can't run with {what}"):
        step(fake, lambda b: b.sum(), torch.ones(2, requires_grad=True))


def test_what_is_no_accelerator_and_what_it_has_itself_are_refused():
    with pytest.raises(
        AdaptiveUsageError, match=r"got a Linear as accelerator.*pip install \"accelerate>="
    ):
        step(nn.Linear(1, 1), lambda b: b.sum(), torch.ones(2))
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(AdaptiveUsageError, match="got scaler=, which the accelerator has"):
        step(accelerator, lambda b: b.sum(), torch.ones(2), scaler=None)


def test_an_optimizer_that_was_prepared_is_refused_inside_the_function():
    loop = Loop(data(8), 8)

    def fn(batch):
        loop.optimizer.step()
        return loop.loss_of(batch)

    with pytest.raises(AdaptiveUsageError, match=r"AdamW\.step\(\) was called inside step\(\)"):
        step(loop.accelerator, fn, next(iter(loop.loader)))
