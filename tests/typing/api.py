"""Never run: uses of the public API that mypy and pyright must accept, with the types they give.

Attributes and results whose type stands beside their name in tenure are not repeated here, unless
a decorator, an overload or a lazy import is between the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Seq2SeqTrainer

import tenure
from tenure import DisposeScope, LeakReport, adaptive, paging, profiler, testing
from tenure.integrations import accelerate, lightning, transformers


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    x: Tensor
    y: Tensor


# --- scopes


def scopes(x: Tensor) -> None:
    with tenure.NewDisposeScope("a", policy="report", on_error="keep", capture="stack") as scope:
        assert_type(scope, DisposeScope)
        assert_type(scope.owned(), list[Tensor])
        scope.dispose_everything_but(x, [x])
    assert_type(scope.leaks, LeakReport | None)
    assert_type(tenure.move_to_outer(Pair(x, x)), Pair)
    assert_type(tenure.detach_from_scope(Batch(x, x)), Batch)
    assert_type(tenure.attach_to_scope([x]), list[Tensor])
    assert_type(tenure.move_to(scope, {"x": x}), dict[str, Tensor])
    assert_type(tenure.move_to(None, x), Tensor)
    assert_type(scope.move_to_outer(x), Tensor)
    assert_type(scope.move_to(None, x), Tensor)
    assert_type(scope.detach(x), Tensor)
    assert_type(scope.attach(x), Tensor)
    assert_type(tenure.dispose(x), Tensor)
    assert_type(tenure.owner_of(x), DisposeScope | None)


@tenure.scoped
def plain(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@tenure.scoped(name="chunks", policy="raise", on_error="keep")
def chunks(x: Tensor) -> list[Tensor]:
    return [*x]


@tenure.scoped
async def later(x: Tensor) -> Tensor:
    return x


@tenure.persist()
def cached(n: int) -> Tensor:
    with tenure.persist():
        return torch.ones(n)


async def functions(x: Tensor) -> str:
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(chunks(x), list[Tensor])
    assert_type(await later(x), Tensor)
    assert_type(cached(2), Tensor)
    return tenure.__version__


# --- reports


def reports(model: nn.Module, leaks: LeakReport) -> None:
    assert_type(LeakReport.from_dict(leaks.to_dict()), LeakReport)
    assert_type(adaptive.PeakReport.from_dict({}).against("24GiB"), adaptive.PeakReport)
    profiler.MemReporter(model).report(verbose=True, device="cpu")
    with profiler.Timeline() as timeline:
        assert_type(timeline, profiler.Timeline)
    assert_type(timeline.export("run.json"), Path)
    loss = torch.ones(1)
    assert_type(profiler.saved_for_backward(loss, [loss], {"a": loss}), profiler.SavedReport)
    names: list[str] = profiler.holders(model)
    assert_type(profiler.snapshot().diff(profiler.snapshot()), profiler.SnapshotDiff)
    with profiler.record_oom(quiet=True) as recorder:
        assert_type(recorder.report, profiler.OomReport | None)
    assert names


@profiler.profile
def profiled(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@profiler.profile_every(10, columns=("hits", "peak"))
def profiled_often(x: Tensor) -> int:
    return len(x)


def profiling(x: Tensor) -> None:
    assert_type(profiled(x, scale=2.0), Tensor)
    assert_type(profiled_often(x), int)
    with profiler.LineProfiler(profiled, nn.Linear(1, 1), device="cpu") as lines:
        assert_type(lines, profiler.LineProfiler)
    assert_type(lines.display(["profiled", profiled], columns=("a",)), profiler.RecordsDisplay)
    try:
        with profiler.Courtesy("cuda") as courtesy:
            assert_type(courtesy.yield_memory(), profiler.CourtesyReport)
    except profiler.AwayTensorError as error:
        assert_type(error.courtesy, profiler.Courtesy | None)


# --- adaptive


@adaptive.memory_budget(4096)
def limited(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@adaptive.batch(initial_batchsize=64, minimum=4, align=4, context=("a", 1), restore_rng=True)
def sized(batch_size: int, x: Tensor, *, scale: float = 1.0) -> list[Tensor]:
    return [x[:batch_size] * scale]


@adaptive.batch
def bare(batch_size: int, name: str) -> str:
    return name * batch_size


@adaptive.range(initial_step=64, collect="list")
def walked(start: int, end: int, x: Tensor) -> int:
    return end - start


@adaptive.chunked(dimension=1, collect="cat", cache_type=adaptive.NoBatchsizeCache)
def joined(chunk: Tensor, start: int, end: int, scale: float) -> Tensor:
    return chunk * scale


def total(counts: list[int]) -> float:
    return float(sum(counts))


@adaptive.chunked(collect=total)
def counted(chunk: Tensor, start: int, end: int) -> int:
    return end - start


class Losses:
    def update(self, loss: Tensor, weight: int = 1) -> None: ...


@adaptive.chunked(collect=Losses())
def reduced_to(chunk: Tensor, start: int, end: int) -> tuple[Tensor, int]:
    return chunk.sum(), end - start


class Embedder:
    @adaptive.batch(initial_batchsize=64, on_retry=print)
    def embed(self, batch_size: int, texts: list[str]) -> Tensor:
        return torch.ones(len(texts), batch_size)

    @adaptive.chunked(collect="list")
    def rows(self, chunk: Tensor, start: int, end: int, *, scale: int = 1) -> Tensor:
        return chunk


def adapting(x: Tensor, embedder: Embedder) -> None:
    with adaptive.memory_budget("64MiB", device=torch.device("cpu")) as budget:
        assert_type(budget, adaptive.memory_budget)
    assert_type(limited(x, scale=2.0), Tensor)
    assert_type(sized(x, scale=2.0), list[Tensor])
    assert_type(sized(x, toma_initial_batchsize=8, toma_context="b"), list[Tensor])
    assert_type(bare("a"), str)
    assert_type(walked(0, 8, x, toma_initial_step=4), Any)
    assert_type(joined(x, 2.0, toma_dimension=0), Any)
    assert_type(counted(x), Any)
    assert_type(reduced_to(x), Any)
    assert_type(embedder.embed(["a"]), Tensor)
    assert_type(embedder.rows(x, scale=2), Any)

    @adaptive.execute.batch(64)
    def found(batch_size: int) -> str:
        return str(batch_size)

    @adaptive.execute.chunked(x, 4, dimension=1)
    def nothing(chunk: Tensor, start: int, end: int) -> int:
        return end

    assert_type(found, str)
    assert_type(nothing, Any)


def calling() -> None:
    def sizes(batch_size: int, more: str) -> str:
        return more * batch_size

    def width_of(size: int) -> int:
        return size

    def told(event: adaptive.AdaptiveEvent) -> None:
        assert_type(event.next_size, int | None)

    assert_type(adaptive.simple.batch(sizes, 64, "more"), str)
    assert_type(adaptive.explicit.batch(sizes, 64, "more", toma_context="a"), str)
    adaptive.DEFAULT_CACHE_TYPE = adaptive.GlobalBatchsizeCache
    adaptive.find_batch_size(
        width_of, low=8, high=64, margin=0, budget="1GiB", align=8, device="cpu", on_retry=told
    )
    adaptive.find_batch_size(width_of, 64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with adaptive.register_oom("pool exhausted", "device", retry_safe=False) as registration:
        assert_type(registration.kind, adaptive.OomKind)


def stepping(x: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].mean()

    def aside(batch: dict[str, Tensor]) -> tuple[Tensor, str]:
        return batch["x"].mean(), "anything"

    def weighed(batch: Batch) -> tuple[Tensor, int]:
        return batch.x.sum(), len(batch.x)

    def named(batch: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        return {"mean": batch.mean(), "other": (batch.sum(), batch.sum())}

    step, cache = adaptive.step, adaptive.NoBatchsizeCache
    result = step(loss_of, {"x": x}, weight=lambda batch: len(batch["x"]), model=model)
    assert_type(result, adaptive.StepResult)
    assert_type(result.terms, Mapping[str, Tensor])
    assert_type(step(aside, {"x": x}, has_aux=True).aux, tuple[Any, ...])
    step(weighed, Batch(x, x), scaler=torch.amp.GradScaler("cpu"), minimum=2, maximum=8)
    step(loss_of, {"x": x}, backward=lambda loss: (loss / 4).backward(), verify=False)
    step(named, x, then=lambda terms: terms["mean"].log(), once=lambda: x.sum())
    step(model, x, loss=torch.sum, batchnorm="per_chunk", in_dims=1, out_dims=(0, None))
    step(model, x, loss="sum", in_dims={"x": None}, cache_type=cache, context="step")
    assert_type(accelerate.step(object(), loss_of, {"x": x}, maximum=4), adaptive.StepResult)
    assert_type(
        adaptive.check_split(loss_of, {"x": x}, n_samples=4, rtol=1e-6), adaptive.SplitReport
    )
    plan = adaptive.plan
    assert_type(plan(loss_of, {"x": x}, "1GiB", margin=0.1, optimizer=optimizer), adaptive.Plan)
    plan(loss_of, x, "24GiB")  # type: ignore[arg-type]
    plan(loss_of, {"x": x}, 8, loss="avg")  # type: ignore[arg-type]
    first, second = adaptive.lazy(x, x, batch=0)
    model(first).sub(second).square().mean().backward()
    recorded: adaptive.LazyTensor = adaptive.lazy(x)
    assert_type(recorded.value(), Tensor)


# --- paging and testing


def paged(model: nn.Module, x: Tensor) -> None:
    page = paging.page
    mesh = init_device_mesh("cpu", (2,))
    assert_type(page(model, mesh=mesh, host="pageable"), paging.ShardedModel)
    page(model, mesh=mesh, budget="1GiB")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    handles: list[paging.PagedModel] = [
        paging.load_paged(model, "model.safetensors", "cpu", budget="1GiB"),
        paging.load_paged(model, "folder", host=Path("own"), methods=["encode"]),
        page(model, "cuda", training=True, activations="host", prefetch=2),
        page(model, budget=paging.PagingBudget("8GiB")),
        paging.chunk(model, "cuda", 10**8),
    ]
    plan = paging.plan_paging(model, "cuda", "64MiB", budget="6GiB", keep=["a"], compute_s=0.1)
    assert_type(plan, paging.PagingPlan)
    with page(model, torch.device("cuda"), budget="80%", methods=("encode",)) as handle:
        assert_type(handle, paging.PagedModel)
        handle(x)
        assert_type(handle.report(), paging.PagingReport)
    handles[0].unpage()


def simulated(work: Callable[[], int]) -> None:
    rates = testing.Rates(flops_per_s=1e9)
    with testing.simulated_accelerator(budget="1MiB", rates=rates, fail_at=3) as sim:
        assert_type(sim(allocator="cuda", devices=2), testing.Simulator)
        sim.launch_kernel(1e-3, reads=[torch.ones(1)])
        assert_type(testing.for_each_allocation(work, lambda failure: print(failure.error)), int)
    testing.simulated_accelerator(bugdet="1MiB")  # type: ignore[call-arg]
    testing.simulated_accelerator(allocator="native")  # type: ignore[arg-type]


# --- integrations


class Fitting(lightning.AdaptiveMixin, LightningModule):
    adaptive_options = {"weight": lambda batch: len(batch), "minimum": 2}  # noqa: RUF012

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("mean", batch.mean(), prog_bar=True)
        return batch.mean()


class Seq2Seq(transformers.AdaptiveTrainerMixin, Seq2SeqTrainer):
    adaptive_options = {"minimum": 2}  # noqa: RUF012


def training(trainer: transformers.AdaptiveTrainer, module: Fitting) -> None:
    assert_type(trainer.adaptive_result, adaptive.StepResult | None)
    callback = transformers.MemoryCallback(share=0.1)
    trainer.add_callback(callback)
    Seq2Seq(trainer.model, callbacks=[callback]).train(resume_from_checkpoint=True)
    assert_type(module.adaptive_result, adaptive.StepResult | None)
    Trainer(callbacks=[lightning.MemoryCallback(share=0.1)]).fit(module)
