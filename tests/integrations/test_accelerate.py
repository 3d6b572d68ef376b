"""A loop of accelerate, by the real package, with `step` in the place of forward and backward."""

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


def network(width=32, depth=4, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), *hidden, nn.Linear(width, 10)).to(dtype)


def data(n, dtype=torch.float32):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, 16, dtype=dtype), torch.randint(10, (n,)))


class Loop:
    """A training loop; with options of `step`, that runs forward and backward."""

    def __init__(self, dataset, *, batch_size, options=None, make=network, **accelerator):
        self.accelerator = accelerate.Accelerator(cpu=True, **accelerator)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
        loader = DataLoader(dataset, batch_size=batch_size)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.options = options
        self.losses, self.sizes, self.gradients = [], [], []
        self.n_updates = 0

    def loss_of(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def run_batch(self, batch):
        if self.options is None:
            loss = self.loss_of(batch)
            self.accelerator.backward(loss)
        else:
            result = step(self.accelerator, self.loss_of, batch, **self.options)
            self.sizes, loss = result.sizes, result.loss
        self.losses.append(loss.item())

    def train_on(self, batch):
        with self.accelerator.accumulate(self.model):
            self.run_batch(batch)
            self.gradients = [p.grad.clone() for p in self.model.parameters()]
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.n_updates += 1
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def run(self, n_updates):
        while self.n_updates < n_updates:
            for batch in self.loader:
                self.train_on(batch)
                if self.n_updates == n_updates:
                    break
        return self

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]


def farthest(ours, plain):
    return max(
        float((a - b).abs().max())
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def test_a_loop_in_a_third_of_its_memory_trains_the_same_model(events):
    dataset = data(3 * 1024 + 100, torch.float64)
    settings = {
        "batch_size": 1024,
        "gradient_accumulation_steps": 2,
        "make": lambda: network(32, 8, torch.float64),
    }
    with memory_budget("1GiB") as needed:
        plain = Loop(dataset, **settings).run(8)
    events.clear()
    with memory_budget(needed.peak_bytes // 3):
        ours = Loop(dataset, options={}, **settings).run(8)
    assert farthest(ours, plain) <= 1e-6
    assert ours.losses == pytest.approx(plain.losses, rel=1e-9)
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    # no step was lost, and it did run out of memory
    assert len(ours.losses) == len(plain.losses)
    n_failures = sum(event.kind in ("retry", "shrink") for event in events)
    assert 1 <= n_failures <= 3


# --- accumulation, step by step


@pytest.mark.parametrize("sync_with_dataloader", [True, False])
def test_gradients_are_those_of_the_plain_loop_after_each_batch(sync_with_dataloader):
    plugin = accelerate.utils.GradientAccumulationPlugin(
        num_steps=3, sync_with_dataloader=sync_with_dataloader
    )

    def gradients_of(options):
        loop = Loop(
            data(8 * 7, torch.float64),
            batch_size=8,
            options=options,
            make=lambda: network(8, 1, torch.float64),
            gradient_accumulation_plugin=plugin,
        )
        found, synced = [], []
        for _ in range(2):
            for batch in loop.loader:
                loop.train_on(batch)
                synced.append(loop.accelerator.sync_gradients)
                found.append(loop.gradients)
        return found, synced, loop.losses, loop.sizes

    plain, ours = gradients_of(None), gradients_of({"maximum": 3})
    assert max(ours[3]) == 3
    assert ours[1] == plain[1]
    assert any(plain[1])
    assert not all(plain[1])
    assert ours[2] == pytest.approx(plain[2], rel=1e-10)
    for got, wanted in zip(ours[0], plain[0], strict=True):
        assert all(
            torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(got, wanted, strict=True)
        )


def test_the_reported_loss_is_not_divided_and_nothing_of_the_accelerator_changes():
    loop = Loop(data(8), batch_size=8, options={"maximum": 3}, gradient_accumulation_steps=4)
    (batch,) = loop.loader
    accelerator, shared = loop.accelerator, state.GradientState()
    with accelerator.accumulate(loop.model):
        before = dict(vars(accelerator)), dict(vars(shared)), list(accelerator._models)
        loop.run_batch(batch)
        after = dict(vars(accelerator)), dict(vars(shared)), list(accelerator._models)
    assert after == before
    assert loop.sizes == (3, 3, 2)
    assert loop.losses == [pytest.approx(loop.loss_of(batch).item(), rel=1e-6)]


# --- precision


def test_bfloat16_gives_what_the_micro_batches_give_by_hand():
    def gradients_of(run):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(network())
        run(accelerator, model)
        return [p.grad.clone() for p in model.parameters()]

    x, y = data(12).tensors

    def by_hand(accelerator, model):
        for part in (slice(0, 5), slice(5, 10), slice(10, 12)):
            loss = F.cross_entropy(model(x[part]), y[part], reduction="sum")
            accelerator.backward(loss / 12)

    def ours(accelerator, model):
        def loss_of(batch):
            out = model(batch[0])
            # the model computes in bfloat16, and hands on float32
            assert out.dtype is torch.float32
            return F.cross_entropy(out, batch[1])

        step(accelerator, loss_of, (x, y), maximum=5)

    for got, wanted in zip(gradients_of(ours), gradients_of(by_hand), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_scaler_scales_once_and_skips_what_overflows():
    # accelerate has one where there is an accelerator, and none on the CPU
    def run(options):
        original = accelerate.Accelerator.prepare

        def prepare(self, *args):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
            return original(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerate.Accelerator, "prepare", prepare)
            loop = Loop(
                data(64 * 6),
                batch_size=64,
                options=options,
                gradient_accumulation_steps=2,
                make=lambda: network(8, 1),
            )
        skipped = []
        for i in range(3):
            for batch in loop.loader:
                if i == 1:
                    batch[0][0] = float("inf")
                loop.train_on(batch)
                skipped.append(loop.accelerator.optimizer_step_was_skipped)
        return loop, skipped

    plain, ours = run(None), run({"verify": False, "maximum": 20})
    assert max(ours[0].sizes) == 20
    assert ours[1] == plain[1]
    assert True in plain[1]
    assert ours[0].accelerator.scaler.get_scale() == plain[0].accelerator.scaler.get_scale()
    assert farthest(ours[0], plain[0]) <= 1e-6


# --- models that accelerate has changed


def test_a_dispatched_model_gives_the_same_gradients():
    x, y = data(12).tensors
    net = network(8, 1)
    F.cross_entropy(net(x), y).backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    accelerator = accelerate.Accelerator(cpu=True)
    device_map = {name: "cpu" for name, _ in net.named_children()}
    model = accelerator.prepare(
        accelerate.dispatch_model(net, device_map, main_device="cpu", force_hooks=True)
    )
    assert hasattr(model[0], "_hf_hook")
    step(accelerator, lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y), maximum=5)
    got = [p.grad for p in net.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, wanted, strict=True))


# --- what is refused


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
    loop = Loop(data(8), batch_size=8)

    def fn(batch):
        loop.optimizer.step()
        return loop.loss_of(batch)

    with pytest.raises(AdaptiveUsageError, match=r"AdamW\.step\(\) was called inside step\(\)"):
        step(loop.accelerator, fn, next(iter(loop.loader)))
