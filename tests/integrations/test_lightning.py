"""A LightningModule whose steps are split, against the same one that is not."""

import copy
import logging
import os
import pickle
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tenure import NewDisposeScope, adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    BatchCoupledError,
    SplitMismatchError,
)

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="it is not installed")
import torchmetrics  # noqa: E402
from lightning.pytorch import Callback, LightningModule  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

from tenure.integrations.lightning import AdaptiveMixin, MemoryCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        ".*isinstance.treespec, LeafSpec",
        ".*`training_step` returned `None`",
        "Trying to infer the `batch_size`",
        "Found .* module.s. in eval mode",
        "You called `self.log",
        "You are using the `dataloader_iter` step flavor",
        # dynamo looks there where a graph breaks
        "The .grad attribute of a Tensor that is not a leaf",
    )
]


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


def rows(n=24, width=8):
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=numbers, dtype=torch.float64)
    return x, torch.randint(4, (n,), generator=numbers)


def loader_of(*tensors, batch_size=8):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


class Body:
    """What both libraries' modules have: SGD, for which gradients of another scale are others."""

    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 4)).double()

    def loss_of(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Net(Body, LightningModule):
    pass


class Seen(Callback):
    def __init__(self):
        self.outputs, self.logged, self.told = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.logged.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    def on_before_backward(self, trainer, pl_module, loss):
        self.told.append(("before backward", loss.item()))

    def on_after_backward(self, trainer, pl_module):
        self.told.append(("after backward", norm(pl_module)))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.told.append(("before optimizer", norm(pl_module)))


def norm(module):
    return sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None)


def trainer_of(package=lightning, **options):
    # no callback is checked by name where both libraries' are asked
    return package.Trainer(**{
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
    } | options)  # fmt: skip


def trained(module, loader=None, *, ckpt_path=None, **options):
    trainer = trainer_of(**options)
    trainer.fit(module, loader_of(*rows()) if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


def seeded(kind, **options):
    torch.manual_seed(0)
    module = kind()
    if isinstance(module, AdaptiveMixin):
        declared = getattr(module, "adaptive_options", {})
        module.adaptive_options = {"maximum": 3, **declared, **options}
    return module


def adaptive_of(kind):
    return type(f"Adaptive{kind.__name__}", (AdaptiveMixin, kind), {})


def close(a, b, rtol=1e-10):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol / 100)


def compared(
    kind,
    split=None,
    loader=None,
    *,
    declared=None,
    sizes=(3, 3, 2),
    rtol=1e-10,
    more=dict,
    **options,
):
    """Train without and with the mixin, in micro-batches: parameters, hooks, logs and outputs."""
    modules = [seeded(kind), seeded(split or adaptive_of(kind), **(declared or {}))]
    seen = [Seen(), Seen()]
    for module, each in zip(modules, seen, strict=True):
        trained(module, loader and loader(), callbacks=[each], **options, **more())
    close(*modules, rtol)
    # and it was split: a mixin that does nothing would train the same, too
    assert modules[1].adaptive_result.sizes == sizes
    plain, split = seen
    assert [name for name, _ in plain.told] == [name for name, _ in split.told]
    bounds = {"rtol": rtol, "atol": rtol / 100, "equal_nan": True}
    numbers = [[number for _, number in each.told] for each in seen]
    torch.testing.assert_close(*numbers, **bounds)
    torch.testing.assert_close(plain.outputs, split.outputs, **bounds)
    # logs are float32 to Lightning
    bounds |= {"rtol": max(rtol, 1e-6), "atol": 1e-7}
    torch.testing.assert_close(plain.logged, split.logged, **bounds)
    return modules


class Logging(Body):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": self.accuracy(batch), "rate": 0.1}, on_epoch=True)
        self.log("samples", len(batch[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_epoch=True)
        self.log("number", loss.item(), True, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def accuracy(self, batch):
        return (self.net(batch[0]).argmax(1) == batch[1]).double().mean()


@pytest.mark.parametrize(
    ("package", "n_steps"),
    [(lightning, 20), pytest.param(pytorch_lightning, 2, marks=pytest.mark.slow)],
)
def test_a_third_of_the_memory_trains_the_same(package, n_steps, events):
    class Plain(Logging, package.LightningModule):
        def __init__(self):
            super().__init__(width=32, hidden=64)

    class Watching(Seen, package.Callback):
        pass

    class Fitting(AdaptiveMixin, Plain):
        pass

    loader, results, limit = loader_of(*rows(n_steps * 256, 32), batch_size=256), [], 2**30
    for kind in (Plain, Fitting):
        module, seen = seeded(kind), Watching()
        module.adaptive_options = {}
        with adaptive.memory_budget(limit) as budget:
            trainer = trained(module, loader, package=package, callbacks=[seen])
        results.append((module, seen, trainer.logged_metrics))
        limit = budget.peak_bytes // 3
    (plain, expected, whole), (fitting, seen, split) = results
    close(plain, fitting, 1e-6)
    assert 1 <= sum(event.info is not None for event in events) <= 3
    assert len(seen.outputs) == trainer.global_step == n_steps
    torch.testing.assert_close(seen.outputs, expected.outputs, rtol=1e-8, atol=0)
    torch.testing.assert_close(seen.logged, expected.logged)
    torch.testing.assert_close(split, whole)


# --- features of the Trainer


class Logs(Logging, LightningModule):
    pass


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Sparse(Net):
    """Sparse gradients, tied parameters, and one that is in no optimizer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 4, sparse=True).double()
        self.tied, self.alone = self.net[2], nn.Parameter(torch.ones(4).double())

    def loss_of(self, batch):
        out = self.tied(self.net[:2](batch[0])) * self.rows(batch[1]) + self.alone
        return F.cross_entropy(out, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), *self.rows.parameters()], lr=0.1)


class Float32(Logs):
    def __init__(self):
        super().__init__()
        self.float()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0].to(self.net[0].weight.dtype), batch[1]


class Told(Net):
    """Logs and outputs that don't say how they add up."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        right = out.argmax(1) == batch[1]
        self.log("right as a number", float(right.sum()), batch_size=len(right))
        self.log("summed", F.cross_entropy(out, batch[1], reduction="sum"))
        self.log("largest class", (batch[0].abs() * 10).long().max())
        self.log("batch", batch_idx)
        self.log("weights", self.net[0].weight.norm())
        self.log_dict(
            {"right": right.sum(), "highest": out.max(), "accuracy": right.double().mean()}
        )
        self.log_dict({"said": right.sum()}, reduce_fx="sum", on_step=False, on_epoch=True)
        return {
            "loss": loss, "out": out.detach(), "same": loss.detach(), "mean": out.detach().mean(),
            "nested": {"labels": batch[1], "count": 3, "rows": out.detach()[:, 0].tolist()},
            "right": right.sum(), "total": out.detach().sum(), "highest": out.max().item(),
        }  # fmt: skip


class Chance(Net):
    """What has the size of micro-batches by chance is not taken for samples."""

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("epoch", 3)
        self.log("n", len(batch[0]), reduce_fx="sum")
        self.log("seen", len(batch[1]))
        same = {"count": 3, "weights": torch.ones(3), "names": [2, 1, 0]}
        return {"loss": loss, **same, "rows": batch[0][:, 0], "n": len(batch[1])}


class Skipping(Net):
    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx))
        return None if batch_idx == 1 else self.loss_of(batch)


def spread(out):
    return out.std(0).sum()


class OfSpread(Net):
    def training_step(self, batch, batch_idx):
        return spread(self.net(batch[0]))


class Outputs(AdaptiveMixin, Net):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0])


class Nested(Net):
    def training_step(self, batch, batch_idx):
        return self.loss_of(batch["train"]["pair"]) + self.loss_of(batch["other"])

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"train": {"pair": tuple(batch["a"])}, "other": batch["b"], "note": "text"}


def several_loaders():
    x, y = rows()
    loaders = {"a": loader_of(x, y), "b": loader_of(x.flip(0), y.flip(0))}
    return CombinedLoader(loaders, "min_size")


CASES = {
    "accumulate, clip norm": (
        Logs, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2},
    ),
    "a batch that fits, to the bit": (
        Logs, {"declared": {"maximum": None}, "sizes": (8,), "rtol": 0},
    ),
    "LBFGS": (Lbfgs, {}),
    "sparse": (Sparse, {"accumulate_grad_batches": 2}),
    "bfloat16": (Float32, {"precision": "bf16-mixed", "rtol": 5e-2}),
    "logs and outputs": (Told, {}),
    "sizes by chance": (
        Chance, {"loader": lambda: loader_of(*rows(12), batch_size=6), "sizes": (3, 3)},
    ),
    "skipped": (Skipping, {"accumulate_grad_batches": 2}),
    "a loss of all outputs": (OfSpread, {"split": Outputs, "declared": {"loss": spread}}),
    "several loaders": (Nested, {"loader": several_loaders}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_logs_and_outputs_are_those_of_the_whole_batch(name):
    kind, options = CASES[name]
    compared(kind, **options)


def test_a_scaler_scales_once():
    scalers = []

    def mixed():
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scalers[-1])]}

    compared(Float32, rtol=2e-2, more=mixed, accumulate_grad_batches=2)
    plain, split = scalers
    assert plain.get_scale() == split.get_scale() == 2.0**11


def test_a_resumed_fit_is_the_uninterrupted_one(tmp_path):
    whole, first, second = (seeded(adaptive_of(Net)) for _ in range(3))
    trained(whole, max_epochs=2)
    trained(first).save_checkpoint(tmp_path / "half.ckpt")
    trained(second, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    close(whole, second)


@pytest.mark.slow
def test_a_compiled_module_trains_the_same_with_one_graph_for_all_sizes():
    graphs = CompileCounterWithBackend("eager")
    modules = [seeded(Net), seeded(adaptive_of(Net))]
    trained(modules[0])
    trained(torch.compile(modules[1], backend=graphs))
    close(*modules)
    assert modules[1].adaptive_result.sizes == (3, 3, 2)
    assert graphs.frame_count == 1


# --- what a training_step returns, logs, and gives to metrics


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "the whole is no mean, sum, max"), ({"verify": False}, "nothing could be compared")],
    ids=["no rule", "not compared"],
)
def test_a_log_that_nothing_joins_is_told_once_by_name(options, why):
    class Scored(AdaptiveMixin, Net):
        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            self.log("spread", out.std())
            self.log("said", out.std(), reduce_fx="mean")
            return F.cross_entropy(out, batch[1])

    with pytest.warns(AdaptiveUsageWarning, match=why) as caught:
        trained(seeded(Scored, **options))
    told = [str(each.message) for each in caught if each.category is AdaptiveUsageWarning]
    assert len(told) == 1
    assert told[0].startswith("'spread' was logged")
    assert "reduce_fx=" in told[0]


def test_a_loss_that_is_no_mean_over_samples_is_refused_until_it_is_declared():
    class Ignoring(Net):
        def training_step(self, batch, batch_idx):
            out, valid = self.net(batch[0]), batch[1] != 0
            loss = F.cross_entropy(out, batch[1], ignore_index=0)
            right = out.argmax(1) == batch[1]
            self.log("number", loss.item())
            self.log("accuracy", right[valid].double().mean(), batch_size=len(valid))
            self.log("double", 2 * loss.item(), on_epoch=True)
            self.log("rows", right.double().mean(), batch_size=2 * len(valid), on_epoch=True)
            self.log("valid", valid.sum())
            return loss

    module = seeded(adaptive_of(Ignoring))
    # and in each later fit
    for _ in range(3):
        with pytest.raises(SplitMismatchError, match="weight=") as refused:
            trained(module)
    assert "'AdaptiveIgnoring.training_step'" in str(refused.value)
    assert "stand in its adaptive_options" in refused.value.__notes__[0]
    assert "class_weights[batch[1]].sum()" in refused.value.__notes__[0]
    Ignoring.adaptive_options = {"weight": lambda batch: (batch[1] != 0).sum()}
    compared(Ignoring)


_seen = torchmetrics.SumMetric()


class Metrics(Net):
    """Metrics of the module, in a collection, in plain containers, and in a global."""

    def __init__(self):
        super().__init__()
        kinds, settings = torchmetrics.classification, {"num_classes": 4, "average": "macro"}
        self.accuracy = kinds.MulticlassAccuracy(**settings)
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.several = torchmetrics.MetricCollection(
            {
                "recall": kinds.MulticlassRecall(**settings),
                "precision": kinds.MulticlassPrecision(**settings),
                "auroc": kinds.MulticlassAUROC(num_classes=4),
            }
        )
        self.held = {"train": [torchmetrics.SumMetric()]}
        self.tracker = SimpleNamespace(mean=torchmetrics.MeanMetric().set_dtype(torch.float64))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.mean.update(loss)
        self.several.update(out, batch[1])
        # called, it also gives the value of the batch
        self.held["train"][0]((out.argmax(1) == batch[1]).sum())
        self.tracker.mean.update(loss)
        _seen.update(value=torch.tensor(len(out)))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        held = {"right": self.held["train"][0], "tracked": self.tracker.mean, "seen": _seen}
        for name, metric in held.items():
            self.log(name, metric.compute())
        _seen.reset()


@pytest.mark.filterwarnings("ignore:No .* samples in targets")
def test_metrics_end_as_by_the_whole_batch():
    _, module = compared(Metrics, max_epochs=2)
    assert ["precision", "recall"] in [*module.several.compute_groups.values()]
    assert module.tracker.mean.update_count == 6
    assert "forward" not in vars(module.accuracy)


@pytest.mark.filterwarnings(r"ignore:what Failing.training_step\(\) gave the metric")
@pytest.mark.filterwarnings("ignore:No .* samples in targets")
def test_an_attempt_that_fails_leaves_neither_logs_nor_metrics():
    class Failing(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("length", float(len(batch[0])), reduce_fx="max")
            if len(batch[0]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            metrics = self.mean, self.accuracy, self.tracker.mean
            counts.append([metric.update_count for metric in metrics])
            totals.append(_seen.compute().item())

    counts, totals = [], []
    seen = Seen()
    trained(seeded(Failing, maximum=None), callbacks=[seen])
    # the whole batch failed first, and every other attempt is forgotten too
    assert all(each["length"] <= 3 for each in seen.logged)
    assert counts == [[n] * 3 for n in (1, 2, 3)]
    assert totals == [8, 16, 24]


def sometimes_logged(module, x, loss):
    if len(x) < 3:
        module.log("last", 1.0)
    return loss


def asked(module, x, loss):
    module.mean.update(loss)
    return module.mean.compute()


def edited(module, x, loss):
    module.mean.mean_value += 1.0
    return loss


def made_and_kept(module, x, loss):
    if not hasattr(module, "late"):
        module.late = torchmetrics.MeanMetric()
    return module.late(loss)


def test_attributes_that_micro_batches_leave_with_other_values_are_named_in_a_warning():
    class Keeping(AdaptiveMixin, Net):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()
            precision = torchmetrics.classification.MulticlassPrecision(num_classes=4)
            self.called = torchmetrics.MetricCollection([precision])
            self.n_calls, self.n_seen, self.counted = 0, 0, torch.zeros(())

        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            self.net[0].last, self.mean.mean_value = out.detach(), out.sum().detach()
            self.kind, self.width, self.scores = "mean", 4, torch.zeros(3)
            self.n_calls += 1
            self.counted += 1
            self.n_seen += len(out)
            self.called(out, batch[1])
            return F.cross_entropy(out, batch[1])

    names = "self.counted, self.mean.mean_value, self.n_calls and 1 more"
    told = f"^'Keeping.training_step' sets {names}, and runs in micro-batches: .* of the last one"
    with pytest.warns(AdaptiveUsageWarning, match=told):
        trained(seeded(Keeping))


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (
            lambda module, x, loss: {"loss": loss, "odd": x.T},
            r"'odd', returned by Refused.training_step\(\), is fl",
        ),
        (sometimes_logged, r"training_step\(\) logged nothing for one .* 'last' for another"),
        (
            lambda module, x, loss: loss if len(x) == 3 else None,
            "returned None for some micro-batches",
        ),
        (lambda module, x, loss: module.kept(loss), "was updated by a method that was kept"),
        (asked, r"compute\(\) or reset\(\) of the metric 'mean'"),
        (lambda module, x, loss: copy.deepcopy(module.mean)(loss), "The metric 'mean' was copied"),
        (edited, "The metric 'mean' was copied, or its state was read"),
        (made_and_kept, "The metric 'late' was made in a training_step and kept"),
    ],
)
def test_a_step_that_has_no_whole_is_refused_and_metrics_are_as_before(output, why):
    class Refused(AdaptiveMixin, Metrics):
        def on_fit_start(self):
            self.kept = self.mean.update

        def training_step(self, batch, batch_idx):
            self.accuracy(self.net(batch[0]), batch[1])
            return output(self, batch[0], self.loss_of(batch))

    module = seeded(Refused, verify="None" not in why)
    with pytest.raises(AdaptiveUsageError, match=why):
        trained(module)
    assert not module.accuracy.update_called
    assert not module.mean.update_called


def test_steps_above_and_below_the_mixin_run_once_for_each_micro_batch():
    class Above(Net):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx) * 2

    class Below(AdaptiveMixin, Above):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / 2

    seen = []
    compared(Net, Below, declared={"verify": False})
    assert seen == [3, 3, 2] * 3


def test_a_module_that_no_trainer_trains_is_called_as_it_is():
    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.inner = adaptive_of(Net)()

        def training_step(self, batch, batch_idx):
            loss = self.inner.training_step(batch, batch_idx)
            names.append(loss.grad_fn.name())
            return loss

    names, outer = [], seeded(Outer)
    trained(outer)
    outer.inner.training_step(rows(), 0).backward()
    assert names == ["NllLossBackward0"] * 3
    assert norm(outer.inner) > 0


class Looking(AdaptiveMixin, Net):
    """Notes which gradients of the step before are alive in a step, and what hooks see of them."""

    def __init__(self):
        super().__init__()
        self.alive, self.seen = [], []

    def training_step(self, batch, batch_idx):
        self.alive.append([reference() is not None for reference in self.kept])
        return self.loss_of(batch)

    def on_train_batch_start(self, batch, batch_idx):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.kept = [weakref.ref(gradient.untyped_storage()) for gradient in gradients]


def test_old_gradients_go_before_new_ones_unless_a_hook_looks_at_them():
    class Hooked(Looking):
        def on_before_zero_grad(self, optimizer):
            self.seen.append(norm(self))

    module, hooked, seen = seeded(Looking, maximum=None), seeded(Hooked, maximum=None), Seen()
    trained(module, accumulate_grad_batches=2)
    # the second batch adds to what the first has left, the third begins anew
    assert module.alive == [[], [True] * 4, [False] * 4]
    trained(hooked, callbacks=[seen])
    before = [value for name, value in seen.told if name == "before optimizer"]
    torch.testing.assert_close(hooked.seen, [0, *before[:-1]])


def test_hooks_of_parameters_see_the_whole_gradient_once():
    class Hooked(Net):
        def on_fit_start(self):
            self.seen, weight = [], self.net[0].weight
            weight.register_hook(lambda grad: self.seen.append(grad.norm().item()))
            weight.register_post_accumulate_grad_hook(
                lambda leaf: self.seen.append(leaf.grad.norm().item())
            )

    plain, split = compared(Hooked, accumulate_grad_batches=3)
    torch.testing.assert_close(plain.seen, split.seen, rtol=1e-10, atol=0)
    assert len(plain.seen) == 6


# --- refused


class Manual(AdaptiveMixin, Net):
    automatic_optimization = False

    # without super(), as many write it
    def on_fit_start(self):
        pass


class Normed(AdaptiveMixin, Net):
    def __init__(self):
        super().__init__()
        self.net.append(nn.BatchNorm1d(4).double())


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (Manual, {}, r"backward=self\.manual_backward"),
        (adaptive_of(Net), {"scaler": None}, "adaptive_options of AdaptiveNet has scaler"),
        (Normed, {}, r"self\.net\.3"),
    ],
)
def test_a_module_that_can_not_be_split_is_refused(kind, options, why):
    with pytest.raises((AdaptiveUsageError, BatchCoupledError), match=why):
        trained(seeded(kind, **options))


def test_a_mixin_that_comes_last_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"Put it first: class Late\(AdaptiveMixin"):
        type("Late", (Net, AdaptiveMixin), {})


def test_several_ranks_are_refused_before_anything_is_trained():
    module = seeded(adaptive_of(Net))
    # Lightning leaves the group, and names of the rank, behind
    refused = pytest.raises(AdaptiveUsageError, match="the Trainer uses DDPStrategy")
    with mock.patch.dict(os.environ), refused:
        trained(module, strategy="ddp", devices=1)
    torch.distributed.destroy_process_group()


def test_the_callback_logs_memory_sizes_and_retries():
    class TooLarge(AdaptiveMixin, Net):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return self.loss_of(batch)

    seen, module = Seen(), seeded(TooLarge, maximum=None)
    callback = pickle.loads(pickle.dumps(MemoryCallback(share=float("inf"))))
    assert callback.state_key == "MemoryCallback"
    trained(module, loader_of(*rows(48)), callbacks=[callback, seen], accumulate_grad_batches=2)
    logged = [each for each in seen.logged if each]
    # the second batch is the first step
    assert seen.logged[0] == {}
    assert logged[0]["memory/allocated_bytes"] > 0
    assert logged[0]["adaptive/retries"] >= 1
    assert logged[-1]["adaptive/retries"] == 0
    assert module.adaptive_result.sizes[0] == logged[-1]["adaptive/micro_batch"] <= 3
    assert module.adaptive_result.aux == ()


def test_an_error_of_memory_is_told_with_what_holds_it():
    class Dying(Body, pytorch_lightning.LightningModule):
        def training_step(self, batch, batch_idx):
            self.kept = torch.ones(1000)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    callback = MemoryCallback()
    assert isinstance(callback, Callback)
    assert isinstance(callback, pytorch_lightning.Callback)
    with pytest.raises(torch.OutOfMemoryError) as died:
        trained(seeded(Dying), package=pytorch_lightning, callbacks=[callback])
    assert "float32[1000]" in "".join(died.value.__notes__)
    assert "chunked" not in "".join(died.value.__notes__)


def test_an_error_of_memory_in_an_evaluation_names_what_lets_it_fit():
    class Evaluated(Net):
        def evaluated(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        validation_step = test_step = predict_step = evaluated

    module, loader = seeded(Evaluated), loader_of(*rows())
    for fails in ("validate", "test", "predict"):
        trainer = trainer_of(callbacks=[MemoryCallback()])
        with pytest.raises(torch.OutOfMemoryError) as died:
            getattr(trainer, fails)(module, loader)
        (note,) = died.value.__notes__
        assert f"{fails.replace('validate', 'validation')}_step" in note
        assert "execute.chunked(" in note
        assert 'collect="host"' in note


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_logged_values_can_be_read_after_a_scope_around_fit(package):
    class Plain(Logging, package.LightningModule):
        pass

    found = []
    for block in (nullcontext(), NewDisposeScope()):
        with block:
            trainer = trained(seeded(Plain), package=package)
        found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert found[0] == found[1]
    assert {"loss", "accuracy"} <= found[0].keys()
