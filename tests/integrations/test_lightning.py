"""A LightningModule whose steps are split, against the same one that is not."""

import logging
import math
import os
import pickle
import re
import warnings
import weakref
from types import MappingProxyType
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tenure import adaptive
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
from lightning.pytorch import callbacks as lightning_callbacks  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

from tenure.integrations.lightning import AdaptiveMixin, MemoryCallback  # noqa: E402
from tests.programs import run_program  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        ".*isinstance.treespec, LeafSpec",
        ".*`training_step` returned `None`",
        "Trying to infer the `batch_size`",
        "Found .* module.s. in eval mode",
        "Swapping scheduler",
        "Detected call of `lr_scheduler.step",
        "You called `self.log",
        "You are using the `dataloader_iter` step flavor",
        # dynamo looks there where a graph breaks
        "The .grad attribute of a Tensor that is not a leaf",
    )
]


@pytest.fixture(autouse=True)
def fresh():
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    adaptive.reset()
    yield
    adaptive.reset()


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
    """What callbacks are told."""

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


def trained(module, loader=None, *, package=lightning, ckpt_path=None, callbacks=(), **options):
    options = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
    } | options  # fmt: skip
    trainer = package.Trainer(**options, callbacks=[*callbacks])
    # no callback is checked by name where both libraries' are asked
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


def compared(kind, loader=None, *, rtol=1e-10, more=dict, **options):
    """Train without and with the mixin, in micro-batches: parameters, hooks, logs and outputs."""
    modules, seen = [seeded(kind), seeded(adaptive_of(kind))], [Seen(), Seen()]
    for module, each in zip(modules, seen, strict=True):
        own = more()
        callbacks = [each, *own.pop("callbacks", [])]
        trained(module, loader, callbacks=callbacks, **options, **own)
    close(*modules, rtol)
    # and it was split: a mixin that does nothing would train the same, too
    assert modules[1].adaptive_result.sizes == (3, 3, 2)
    plain, split = seen
    assert [name for name, _ in plain.told] == [name for name, _ in split.told]
    numbers = [[number for _, number in each.told] for each in seen]
    torch.testing.assert_close(*numbers, rtol=rtol, atol=rtol / 100, equal_nan=True)
    # logs are float32 to Lightning
    logged = {"rtol": max(rtol, 1e-6), "atol": 1e-7, "equal_nan": True}
    torch.testing.assert_close(plain.logged, split.logged, **logged)
    outputs = {"rtol": rtol, "atol": rtol / 100, "equal_nan": True}
    torch.testing.assert_close(plain.outputs, split.outputs, **outputs)
    return modules[1], split


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


# --- the acceptance


@pytest.mark.parametrize(
    "package",
    [lightning, pytest.param(pytorch_lightning, marks=pytest.mark.slow)],
    ids=lambda p: p.__name__,
)
def test_a_third_of_the_memory_trains_the_same(package, events):
    class Plain(Logging, package.LightningModule):
        def __init__(self):
            super().__init__(width=32, hidden=64)

    class Watching(Seen, package.Callback):
        pass

    class Fitting(AdaptiveMixin, Plain):
        pass

    loader, results, limit = loader_of(*rows(20 * 256, 32), batch_size=256), [], 2**30
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
    assert len(seen.outputs) == trainer.global_step == 20
    torch.testing.assert_close(seen.outputs, expected.outputs, rtol=1e-8, atol=0)
    torch.testing.assert_close(seen.logged, expected.logged)
    torch.testing.assert_close(split, whole)


class Sizes(Callback):
    """The micro-batch of each step."""

    def __init__(self):
        self.micro_batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.micro_batches.append(pl_module.adaptive_result.micro_batch)


@pytest.mark.slow
def test_gradients_that_accumulate_are_no_reason_to_fail_again():
    class Wide(AdaptiveMixin, Net):
        """Gradients that take a fourth of the memory."""

        def __init__(self):
            super().__init__(64, 256)
            wide = nn.Linear(256, 256).double()
            self.net = nn.Sequential(self.net[0], nn.ReLU(), wide, nn.ReLU(), self.net[2])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    # an odd number of batches: Lightning ends an epoch with an update
    loader, sizes, events = loader_of(*rows(1500, 64), batch_size=500), Sizes(), []
    adaptive.add_listener(events.append)
    try:
        with adaptive.memory_budget("2800KiB"):
            options = {"accumulate_grad_batches": 2, "max_epochs": 10, "callbacks": [sizes]}
            trained(seeded(Wide, maximum=None), loader, **options)
    finally:
        adaptive.remove_listener(events.append)
    assert 1 <= sum(event.info is not None for event in events) <= 3
    # beside gradients of the batch before, fewer samples fit
    first, second, third = sizes.micro_batches[-3:]
    assert second < first == third


# --- features of the Trainer


class Logs(Logging, LightningModule):
    pass


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}
        ]


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Sparse(Net):
    """Gradients that are sparse, tied parameters, and one that is in no optimizer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 4, sparse=True).double()
        self.tied = self.net[2]
        self.alone = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def loss_of(self, batch):
        out = self.tied(self.net[:2](batch[0])) * self.rows(batch[1]) + self.alone
        return F.cross_entropy(out, batch[1])

    def configure_optimizers(self):
        named = self.named_parameters()
        return torch.optim.SGD([p for name, p in named if name != "alone"], lr=0.1)


class Stateful(Net):
    """Adam and dropout of rate zero, which draws random numbers all the same."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.Dropout(0.0))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Logs, {"accumulate_grad_batches": 2}),
        (Logs, {"gradient_clip_val": 0.1}),
        (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Net, {"precision": "64-true", "detect_anomaly": True}),
        (Scheduled, {"max_epochs": 2}),
        (Lbfgs, {}),
        (Sparse, {"accumulate_grad_batches": 2}),
        (Stateful, {}),
    ],
    ids=[
        "accumulate",
        "clip norm",
        "clip value",
        "anomaly",
        "scheduler",
        "LBFGS",
        "sparse",
        "Adam",
    ],
)
def test_the_trainer_does_the_same(kind, options):
    compared(kind, **options)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("EMAWeightAveraging", {"decay": 0.5}), ("StochasticWeightAveraging", {"swa_lrs": 0.01})],
)
def test_weights_are_averaged_the_same(name, settings):
    if not hasattr(lightning_callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    callback = getattr(lightning_callbacks, name)
    compared(Net, max_epochs=3, more=lambda: {"callbacks": [callback(**settings)]})


class Float32(Logs):
    def __init__(self):
        super().__init__()
        self.float()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0].to(self.net[0].weight.dtype), batch[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_alike(precision):
    compared(Float32, precision=precision, rtol=5e-2)


def test_a_scaler_scales_once():
    scalers = []

    def mixed():
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scalers[-1])]}

    compared(Float32, rtol=2e-2, more=mixed, accumulate_grad_batches=2)
    plain, split = scalers
    assert plain.get_scale() == split.get_scale() == 2.0**11


# of the samples to compare with the whole, more fail than not
@pytest.mark.filterwarnings("ignore:'accuracy' was logged .* nothing could be compared")
def test_a_scaler_survives_a_failure_in_its_first_step():
    def too_large(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    class Failing(Float32):
        def loss_of(self, batch):
            loss = super().loss_of(batch)
            # when the loss is scaled already
            if len(batch[0]) > 3:
                loss.register_hook(too_large)
            return loss

    modules = seeded(Float32), seeded(adaptive_of(Failing), maximum=None)
    for module in modules:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trained(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    close(*modules, 2e-2)
    assert modules[1].adaptive_result.micro_batch <= 3


def test_a_batch_that_fits_is_the_plain_step_to_the_bit():
    modules = [seeded(Logs), seeded(adaptive_of(Logs), maximum=None)]
    for module in modules:
        trained(module)
    for p, q in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(p, q)


def test_a_resumed_fit_is_the_uninterrupted_one(tmp_path):
    whole, first, second = (seeded(adaptive_of(Stateful)) for _ in range(3))
    trained(whole, max_epochs=2)
    trainer = trained(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trained(second, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    close(whole, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Net, Logs])
def test_a_compiled_module_trains_the_same_with_one_graph_for_all_sizes(kind):
    graphs = CompileCounterWithBackend("eager")
    modules = [seeded(kind), seeded(adaptive_of(kind))]
    trained(modules[0])
    trained(torch.compile(modules[1], backend=graphs))
    close(*modules)
    assert modules[1].adaptive_result.sizes == (3, 3, 2)
    # what is logged breaks the graph into more of them
    assert graphs.frame_count == 1 if kind is Net else graphs.frame_count > 1


# --- what a training_step returns, logs, and gives to metrics


class Outputs(Body, LightningModule):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return {
            "loss": loss, "out": out.detach(), "same": loss.detach(), "mean": out.detach().mean(),
            "nested": {"labels": batch[1], "count": 3, "rows": out.detach()[:, 0].tolist()},
            "right": (out.argmax(1) == batch[1]).sum(), "total": out.detach().sum(),
            "highest": out.max().item(),
        }  # fmt: skip


def test_outputs_are_those_of_the_whole_batch():
    compared(Outputs)


@pytest.mark.parametrize(
    "odd", [lambda x: x.T, lambda x: x[:, : len(x)]], ids=["turned", "lengths"]
)
def test_outputs_that_cannot_be_joined_are_refused(odd):
    class Odd(AdaptiveMixin, Body, LightningModule):
        def training_step(self, batch, batch_idx):
            return {"loss": self.loss_of(batch), "odd": odd(batch[0])}

    with pytest.raises(
        AdaptiveUsageError, match=r"'odd', returned by Odd.training_step\(\), is fl"
    ):
        trained(seeded(Odd))


class Numbers(Body, LightningModule):
    """Logs that are no means, and don't say what they are."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        right = out.argmax(1) == batch[1]
        self.log("right", right.sum().float())
        self.log("right as a number", float(right.sum()), batch_size=len(right))
        self.log("right as whole ones", right.sum())
        self.log("summed", F.cross_entropy(out, batch[1], reduction="sum"))
        self.log("highest", out.max())
        self.log("largest class", (batch[0].abs() * 10).long().max())
        self.log("batch", batch_idx)
        self.log("accuracy", right.double().mean())
        self.log("weights", self.net[0].weight.norm())
        return F.cross_entropy(out, batch[1])


def test_what_is_logged_is_found_out_to_be_a_sum_a_mean_or_the_largest():
    with warnings.catch_warnings():
        warnings.simplefilter("error", AdaptiveUsageWarning)
        compared(Numbers)


class Listed(Body, LightningModule):
    """The same in a dict, whose options of `log` are those of Lightning."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        right = (out.argmax(1) == batch[1]).double()
        self.log_dict({"right": right.sum(), "highest": out.max(), "accuracy": right.mean()})
        self.log_dict({"said": right.sum()}, reduce_fx="sum", on_step=False, on_epoch=True)
        return F.cross_entropy(out, batch[1])


def test_what_is_logged_in_a_dict_is_found_out_too():
    with warnings.catch_warnings():
        warnings.simplefilter("error", AdaptiveUsageWarning)
        compared(Listed)


class Scored(Body):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.log("spread", out.std())
        self.log("said", out.std(), reduce_fx="mean")
        return F.cross_entropy(out, batch[1])


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "the whole is no mean, sum, max"), ({"verify": False}, "nothing could be compared")],
    ids=["no rule", "not compared"],
)
def test_a_log_that_nothing_joins_is_told_once_by_name(options, why):
    class Adaptive(AdaptiveMixin, Scored, LightningModule):
        pass

    with pytest.warns(AdaptiveUsageWarning, match=why) as caught:
        trained(seeded(Adaptive, **options))
    told = [str(each.message) for each in caught if each.category is AdaptiveUsageWarning]
    assert len(told) == 1
    assert told[0].startswith("'spread' was logged")
    assert "reduce_fx=" in told[0]


def test_a_log_of_some_micro_batches_alone_is_refused():
    class Sometimes(AdaptiveMixin, Net):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) < 3:
                self.log("last", 1.0)
            return self.loss_of(batch)

    with pytest.raises(
        AdaptiveUsageError, match=r"training_step\(\) logged nothing for one .* 'last' for another"
    ):
        trained(seeded(Sometimes))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_returns_none_is_skipped(accumulate):
    class Skipping(Net):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx))
            return None if batch_idx == 1 else self.loss_of(batch)

    compared(Skipping, accumulate_grad_batches=accumulate)


def test_none_for_some_micro_batches_is_refused():
    class Sometimes(AdaptiveMixin, Net):
        def training_step(self, batch, batch_idx):
            return None if len(batch[0]) < 3 else self.loss_of(batch)

    with pytest.raises(AdaptiveUsageError, match="returned None for some micro-batches"):
        trained(seeded(Sometimes, verify=False))


class Ignoring(Net):
    def training_step(self, batch, batch_idx):
        out, valid = self.net(batch[0]), batch[1] != 0
        loss = F.cross_entropy(out, batch[1], ignore_index=0)
        right = out.argmax(1) == batch[1]
        self.log("loss", loss.detach())
        self.log("number", loss.item())
        self.log("accuracy", right[valid].double().mean(), batch_size=len(valid))
        self.log("double", 2 * loss.item(), on_epoch=True)
        self.log("rows", right.double().mean(), batch_size=2 * len(valid), on_epoch=True)
        self.log("samples", len(valid))
        self.log("valid", valid.sum())
        return loss


def test_a_loss_that_is_no_mean_over_samples_is_refused_until_it_is_declared():
    with pytest.raises(SplitMismatchError, match="weight=") as refused:
        trained(seeded(adaptive_of(Ignoring)))
    assert "'AdaptiveIgnoring.training_step'" in str(refused.value)
    assert "stand in its adaptive_options" in refused.value.__notes__[0]

    class Declared(Ignoring):
        adaptive_options = MappingProxyType({"weight": lambda batch: (batch[1] != 0).sum()})

    compared(Declared)


def test_a_loss_that_was_refused_is_refused_in_each_later_fit():
    module = seeded(adaptive_of(Ignoring))
    for _ in range(4):
        with pytest.raises(SplitMismatchError, match="weight="):
            trained(module)


def test_a_sum_is_declared_and_logged_as_one():
    class Summing(Net):
        adaptive_options = MappingProxyType({"loss": "sum"})

        def training_step(self, batch, batch_idx):
            loss = 0.1 * F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
            self.log("loss", loss, on_epoch=True)
            return {"loss": loss, "same": loss.item()}

    compared(Summing)


def test_a_batch_without_a_valid_label_is_as_without_the_mixin():
    class Declared(Ignoring):
        adaptive_options = MappingProxyType({"weight": lambda batch: (batch[1] != 0).sum()})

        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad.nan_to_num_()

    x, y = rows(8)
    _, seen = compared(Declared, loader_of(x, torch.zeros_like(y)))
    assert math.isnan(seen.logged[0]["accuracy"])


def test_modules_that_mix_samples_are_refused_or_declared():
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.net.append(nn.BatchNorm1d(4).double())

    with pytest.raises(BatchCoupledError, match=r"self\.net\.3"):
        trained(seeded(adaptive_of(Normed)))
    trained(seeded(adaptive_of(Normed), batchnorm="per_chunk"))


def test_a_loss_of_all_outputs_sees_all_outputs():
    def spread(out):
        return out.std(0).sum()

    class Contrastive(AdaptiveMixin, Net):
        adaptive_options = MappingProxyType({"loss": spread})

        def training_step(self, batch, batch_idx):
            return self.net(batch[0])

    class Plain(Net):
        def training_step(self, batch, batch_idx):
            return spread(self.net(batch[0]))

    modules = seeded(Plain), seeded(Contrastive)
    for module in modules:
        trained(module)
    close(*modules)
    assert modules[1].adaptive_result.sizes == (3, 3, 2)


def test_a_log_in_a_loss_of_outputs_is_refused():
    class Contrastive(AdaptiveMixin, Net):
        @property
        def adaptive_options(self):
            return {"loss": self.spread, "maximum": 3}

        def spread(self, out):
            self.log("spread", out.std())
            return out.std(0).sum()

        def training_step(self, batch, batch_idx):
            return self.net(batch[0])

    torch.manual_seed(0)
    with pytest.raises(AdaptiveUsageError, match="was called in loss="):
        trained(Contrastive())


class Metrics(Net):
    def __init__(self):
        super().__init__()
        settings = {"num_classes": 4, "average": "macro"}
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(**settings)
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.right = torchmetrics.SumMetric()
        self.seen = torchmetrics.SumMetric()
        self.several = torchmetrics.MetricCollection(
            {
                "recall": torchmetrics.classification.MulticlassRecall(**settings),
                "auroc": torchmetrics.classification.MulticlassAUROC(num_classes=4),
            }
        )

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.mean.update(loss)
        self.right.update((out.argmax(1) == batch[1]).sum().float())
        self.seen.update(value=torch.tensor(len(out)))
        self.several.update(out, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:No .* samples in targets")
def test_metrics_end_as_by_the_whole_batch():
    module, _ = compared(Metrics, max_epochs=2)
    assert "forward" not in vars(module.accuracy)
    assert "forward" not in vars(module.several)


class Kept(Net):
    """Metrics that a plain list and a dict of dicts hold."""

    def __init__(self):
        super().__init__()
        self.means = [torchmetrics.MeanMetric().set_dtype(torch.float64)]
        self.scores = {"train": {"right": torchmetrics.SumMetric()}}

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.means[0].update(loss)
        # called, it also gives the value of the batch
        self.scores["train"]["right"]((out.argmax(1) == batch[1]).sum())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.means[0].compute())
        self.log("right", self.scores["train"]["right"].compute())


def test_metrics_in_plain_containers_end_as_by_the_whole_batch():
    module, _ = compared(Kept, max_epochs=2)
    assert module.means[0]._update_count == 6


class Tracker:
    """An object of the program's own."""

    def __init__(self):
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)


_right = torchmetrics.SumMetric()
_seen = torchmetrics.SumMetric()


class Elsewhere(Net):
    """Metrics that no module, list or dict of the module holds."""

    def __init__(self):
        super().__init__()
        self.tracker = Tracker()

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.tracker.mean.update(loss)
        _right((out.argmax(1) == batch[1]).sum())
        _seen.update(torch.tensor(len(out)))
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.tracker.mean.compute())
        for name, metric in (("right", _right), ("seen", _seen)):
            self.log(name, metric.compute())
            metric.reset()


def test_metrics_that_no_module_holds_end_as_by_the_whole_batch():
    module, _ = compared(Elsewhere, max_epochs=2)
    assert module.tracker.mean.update_count == 6


@pytest.mark.filterwarnings(r"ignore:what Failing.training_step\(\) gave the metric 'SumMetric")
def test_an_attempt_that_fails_leaves_no_metric_that_no_module_holds_updated():
    class Failing(AdaptiveMixin, Elsewhere):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counts.append((self.tracker.mean.update_count, _right.update_count))
            seen.append(_seen.compute().item())

    counts, seen = [], []
    trained(seeded(Failing, maximum=None))
    assert counts == [(1, 1), (2, 2), (3, 3)]
    assert seen == [8, 16, 24]


def test_a_metric_updated_by_a_method_that_was_kept_is_refused():
    class Keeping(AdaptiveMixin, Elsewhere):
        def __init__(self):
            super().__init__()
            self.add = self.tracker.mean.update

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            self.add(loss)
            return loss

    module = seeded(Keeping)
    with pytest.raises(AdaptiveUsageError, match="was updated by a method that was kept"):
        trained(module)
    assert not module.tracker.mean.update_called


class Grouped(Net):
    """A collection whose metrics share a state, asked for its items in a step."""

    def __init__(self):
        super().__init__()
        kinds = torchmetrics.classification
        self.group = torchmetrics.MetricCollection(
            {"precision": kinds.MulticlassPrecision(4), "recall": kinds.MulticlassRecall(4)}
        )

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.group.update(out, batch[1])
        self.log_dict(self.group, on_step=False, on_epoch=True)
        return F.cross_entropy(out, batch[1])


def test_a_collection_with_groups_ends_as_by_the_whole_batch():
    module, _ = compared(Grouped, max_epochs=2)
    assert module.group.compute_groups == {0: ["precision", "recall"]}


def test_a_collection_updated_by_a_method_that_was_kept_is_refused():
    class Keeping(AdaptiveMixin, Grouped):
        def __init__(self):
            super().__init__()
            self.add = self.group.update

        def training_step(self, batch, batch_idx):
            self.add(self.net(batch[0]), batch[1])
            return self.loss_of(batch)

    module = seeded(Keeping)
    with pytest.raises(AdaptiveUsageError, match="was updated by a method that was kept"):
        trained(module)
    assert not module.group.precision.update_called


class Alone(torchmetrics.MeanMetric):
    """A metric that asks no base for its attributes."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class ByBase(torchmetrics.MeanMetric):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Alone, ByBase])
def test_a_metric_with_attributes_of_its_own_ends_as_by_the_whole_batch(kind):
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.mean = kind().set_dtype(torch.float64)

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            self.mean(loss)
            self.mean.update(3 * loss)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self):
            counts.append(self.mean.update_count)

    counts = []
    compared(Own)
    assert counts == [6, 6]


class Making(Net):
    """Metrics made in a step: called, asked, cloned, and in a collection."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.several = torchmetrics.MetricCollection([torchmetrics.SumMetric()])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        made = torchmetrics.MeanMetric().set_dtype(torch.float64)
        made.update(loss)
        self.log("made", made.compute())
        self.log("cloned", self.mean.clone()(loss))
        several = self.several.clone()
        several.update(len(batch[1]))
        self.log_dict(several.compute(), reduce_fx="sum")
        return loss


def test_metrics_made_in_a_step_are_those_of_torchmetrics():
    module, _ = compared(Making, max_epochs=2)
    assert not module.mean.update_called


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"maximum": None}])
@pytest.mark.parametrize("holder", [lambda m: m, lambda m: torchmetrics.MetricCollection([m])])
def test_a_metric_made_in_a_step_and_kept_is_refused(holder, options):
    class Lazy(AdaptiveMixin, Net):
        def training_step(self, batch, batch_idx):
            if not hasattr(self, "mean"):
                self.mean = holder(torchmetrics.MeanMetric())
            loss = self.loss_of(batch)
            self.mean.update(loss)
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

    told = "The metric 'mean' was made in a training_step and kept"
    with pytest.raises(AdaptiveUsageError, match=told):
        trained(seeded(Lazy, **options))


def test_a_number_for_a_metric_that_nothing_joins_is_told_by_its_place():
    class Spread(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            self.mean.update(batch[0].std())
            return self.loss_of(batch)

    told = (
        "what Spread.training_step() gave the metric 'mean.update'[0] is a number in a batch that "
        "runs in micro-batches, and nothing could be compared with the whole: the mean of theirs "
        "is told. Give tensors or lists with one row a sample in its place."
    )
    with pytest.warns(AdaptiveUsageWarning, match=re.escape(told)):
        trained(seeded(Spread, verify=False))


def test_a_metric_is_not_asked_in_the_middle():
    class Asking(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            self.mean.update(self.loss_of(batch))
            self.log("mean", self.mean.compute())
            return self.loss_of(batch)

    with pytest.raises(AdaptiveUsageError, match=r"compute\(\) or reset\(\) of the metric 'mean'"):
        trained(seeded(Asking))


def test_a_metric_takes_no_state_of_another_in_micro_batches():
    class Merging(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            fresh = torchmetrics.MeanMetric()
            fresh.update(self.loss_of(batch).detach())
            self.mean.merge_state(fresh)
            return self.loss_of(batch)

    with pytest.raises(AdaptiveUsageError, match=r"merge_state\(\) of the metric 'mean'"):
        trained(seeded(Merging))


@pytest.mark.parametrize("refused", ["log", "extra", "metric"])
def test_what_is_refused_leaves_metrics_as_they_were(refused):
    class Odd(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if refused == "log" and len(batch[0]) < 3:
                self.log("last", 1.0)
            if refused == "metric":
                self.mean.update(batch[0].T)
            return {"loss": loss, "odd": batch[0].T if refused == "extra" else 1}

    module = seeded(Odd)
    with pytest.raises(AdaptiveUsageError, match="micro-batch"):
        trained(module)
    assert not module.mean.update_called
    assert not module.accuracy.update_called


@pytest.mark.filterwarnings(r"ignore:what Failing.training_step\(\) gave the metric 'right")
@pytest.mark.filterwarnings(r"ignore:what Failing.training_step\(\) gave the metric 'seen")
def test_an_attempt_that_fails_leaves_neither_logs_nor_metrics():
    class Failing(AdaptiveMixin, Metrics):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("length", float(len(batch[0])), reduce_fx="max")
            if len(batch[0]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counts.append((self.mean.update_count, self.accuracy.update_count))

    counts = []
    seen, module = Seen(), seeded(Failing)
    del module.adaptive_options["maximum"]
    trained(module, callbacks=[seen])
    # the whole batch failed first, and every other attempt is forgotten too
    assert all(each["length"] <= 3 for each in seen.logged)
    assert counts == [(1, 1), (2, 2), (3, 3)]


# --- batches


class Nested(Net):
    def training_step(self, batch, batch_idx):
        pair = batch["train"]["pair"]
        return self.loss_of(pair) + self.loss_of(batch["other"])

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"train": {"pair": tuple(batch["a"])}, "other": batch["b"], "note": "text"}


def test_batches_of_several_loaders_and_batch_hooks():
    x, y = rows()
    loaders = {"a": loader_of(x, y), "b": loader_of(x.flip(0), y.flip(0))}
    compared(Nested, CombinedLoader(loaders, "min_size"))


# --- the class


def test_a_step_above_a_step_runs_once():
    class Above(Net):
        def training_step(self, batch, batch_idx):
            self.seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx) * 2

    class Between(AdaptiveMixin, Above):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / 2

    modules = seeded(Net), seeded(Between, verify=False)
    modules[1].seen = []
    for module in modules:
        trained(module)
    close(*modules)
    # as many as there are micro-batches
    assert modules[1].seen == [3, 3, 2] * 3


def test_a_step_of_a_class_below_one_that_fits_runs_once():
    class Below(adaptive_of(Net)):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 2

    class Plain(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 2

    modules = seeded(Plain), seeded(Below)
    for module in modules:
        trained(module)
    close(*modules)
    assert modules[1].adaptive_result.sizes == (3, 3, 2)


def test_a_module_without_a_trainer_is_called_as_it_is():
    module = seeded(adaptive_of(Net))
    loss = module.training_step(rows(), 0)
    loss.backward()
    assert norm(module) > 0
    assert loss.grad_fn.name() != "_DeliveryBackward"


def test_hooks_of_parameters_see_the_whole_gradient_once():
    class Hooked(Net):
        def on_fit_start(self):
            self.seen, weight = [], self.net[0].weight
            weight.register_hook(lambda grad: self.seen.append(grad.norm().item()))
            weight.register_post_accumulate_grad_hook(
                lambda leaf: self.seen.append(leaf.grad.norm().item())
            )

    modules = seeded(Hooked), seeded(adaptive_of(Hooked))
    for module in modules:
        trained(module, accumulate_grad_batches=3)
    torch.testing.assert_close(modules[0].seen, modules[1].seen, rtol=1e-10, atol=0)
    assert len(modules[0].seen) == 6


class Looking(AdaptiveMixin, Net):
    """Keeps what gradients are there while the step runs."""

    def __init__(self):
        super().__init__()
        # read by autograd, and so inside the step, whose own gradients stand in `.grad`
        self.alive = []

    def training_step(self, batch, batch_idx):
        self.alive.append([reference() is not None for reference in self.kept])
        return self.loss_of(batch)

    def on_train_batch_start(self, batch, batch_idx):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.kept = [weakref.ref(gradient.untyped_storage()) for gradient in gradients]


def test_old_gradients_go_before_new_ones_are_made():
    module = seeded(Looking, maximum=None)
    trained(module, accumulate_grad_batches=2)
    # the second batch adds to what the first has left, the third begins anew
    assert module.alive == [[], [True] * 4, [False] * 4]


def test_old_gradients_stay_for_hooks_that_look_at_them():
    class Hooked(Looking):
        def on_before_zero_grad(self, optimizer):
            self.seen.append(norm(self))

    seen, module = Seen(), seeded(Hooked, maximum=None)
    module.seen = []
    trained(module, callbacks=[seen])
    before = [value for name, value in seen.told if name == "before optimizer"]
    torch.testing.assert_close(module.seen, [0, *before[:-1]])


# --- refused


def test_manual_optimization_is_refused_with_the_call_to_write():
    class Manual(AdaptiveMixin, Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        # without super(), as many write it
        def on_fit_start(self):
            pass

    with pytest.raises(AdaptiveUsageError, match=r"backward=self\.manual_backward"):
        trained(Manual())


def test_the_call_to_write_trains_the_same():
    class Manual(Net):
        """As the refusal says."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            result = adaptive.step(self.loss_of, batch, maximum=3, backward=self.manual_backward)
            optimizer.step()
            return result.loss

    modules = seeded(Net), seeded(Manual)
    for module in modules:
        trained(module)
    close(*modules)


def test_several_ranks_are_refused_before_anything_is_trained():
    module = seeded(adaptive_of(Net))
    # Lightning leaves the group, and names of the rank, behind
    refused = pytest.raises(AdaptiveUsageError, match="the Trainer uses DDPStrategy")
    with mock.patch.dict(os.environ), refused:
        trained(module, strategy="ddp", devices=1)
    torch.distributed.destroy_process_group()


def test_a_mixin_that_comes_last_is_refused():
    with pytest.raises(AdaptiveUsageError, match=r"Put it first: class Late\(AdaptiveMixin"):

        class Late(Net, AdaptiveMixin):
            pass


def test_a_training_step_that_the_mixin_does_not_see_is_refused():
    class Set(AdaptiveMixin, Net):
        pass

    Set.training_step = Net.training_step
    with pytest.raises(AdaptiveUsageError, match="was set after its class was made"):
        trained(Set())


def test_a_module_inside_of_another_is_called_as_it_is():
    class Outer(Net):
        def __init__(self):
            super().__init__()
            self.inner = adaptive_of(Net)()

        def training_step(self, batch, batch_idx):
            loss = self.inner.training_step(batch, batch_idx)
            names.append(loss.grad_fn.name())
            return loss

    names = []
    trained(seeded(Outer))
    assert names == ["NllLossBackward0"] * 3


def test_an_iterator_of_batches_is_refused():
    class Iterating(AdaptiveMixin, Net):
        def training_step(self, dataloader_iter):
            return self.loss_of(next(dataloader_iter)[0])

    with pytest.raises(AdaptiveUsageError, match="takes the iterator of its data loader"):
        trained(Iterating())


def test_what_lightning_decides_is_no_option():
    with pytest.raises(AdaptiveUsageError, match="adaptive_options of AdaptiveNet has scaler"):
        trained(seeded(adaptive_of(Net), scaler=None))


# --- the callback


class TooLarge(AdaptiveMixin, Net):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.loss_of(batch)


def test_the_callback_logs_memory_sizes_and_retries():
    seen, module = Seen(), seeded(TooLarge)
    del module.adaptive_options["maximum"]
    callbacks = [MemoryCallback(share=float("inf")), seen]
    loader = loader_of(*rows(48))
    trained(module, loader, callbacks=callbacks, accumulate_grad_batches=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["validation", "test", "predict"])
def test_an_error_of_memory_in_an_evaluation_names_what_lets_it_fit(fails):
    class Evaluated(Net):
        def evaluated(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        validation_step = test_step = predict_step = evaluated

    trainer, module = trained(seeded(Net), callbacks=[MemoryCallback()]), seeded(Evaluated)
    call = {"validation": trainer.fit, "test": trainer.test, "predict": trainer.predict}[fails]
    trainer.fit_loop.max_epochs = 2
    loaders = [loader_of(*rows())] * (2 if fails == "validation" else 1)
    with pytest.raises(torch.OutOfMemoryError) as died:
        call(module, *loaders)
    (note,) = died.value.__notes__
    assert f"{fails}_step" in note
    assert "execute.chunked(" in note
    assert 'collect="host"' in note


def test_a_callback_is_copied_as_what_it_is():
    callback = pickle.loads(pickle.dumps(MemoryCallback(share=0.5)))
    assert isinstance(callback, Callback)
    assert callback.state_key == "MemoryCallback"


_WITHOUT = """
import sys
import tenure.integrations
assert "lightning" not in sys.modules
from tenure.integrations import lightning
assert not {"lightning", "lightning.pytorch", "pytorch_lightning"} & set(sys.modules)
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
del sys.modules["tenure.integrations.lightning"]
try:
    import tenure.integrations.lightning
except ImportError as error:
    assert 'pip install "lightning>=2.4"' in str(error)
else:
    raise AssertionError
"""


def test_the_libraries_are_imported_by_who_uses_them():
    done = run_program(_WITHOUT)
    assert done.returncode == 0, done.stderr
