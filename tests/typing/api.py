"""Never run: uses of the public API that mypy and pyright must accept, with the types they give.

Attributes whose type stands beside their name in a class are not repeated here.
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
from tenure import (
    DisposedTensorError,
    DisposeScope,
    LeakReport,
    NewDisposeScope,
    ReportFormatError,
    ScopeLeakError,
    ScopeUsageError,
    ScopeUsageWarning,
    TenureError,
    TenureWarning,
    attach_to_scope,
    current_scope,
    detach_from_scope,
    dispose,
    is_disposed,
    move_to,
    move_to_outer,
    owner_of,
    persist,
    scoped,
    statistics,
)
from tenure.adaptive import (
    AdaptiveEvent,
    AdaptiveUsageError,
    AdaptiveUsageWarning,
    BatchCoupledError,
    GlobalBatchsizeCache,
    LazyTensor,
    NoBatchsizeCache,
    OomInfo,
    OomKind,
    PeakReport,
    Plan,
    RemoteRankError,
    SplitMismatchError,
    SplitReport,
    StepResult,
    batch,
    check_split,
    chunked,
    execute,
    explicit,
    find_batch_size,
    is_oom,
    memory_budget,
    oom_info,
    register_oom,
    set_cpu_memory_limit,
    simple,
    step,
)
from tenure.integrations.accelerate import step as accelerated_step
from tenure.integrations.lightning import AdaptiveMixin, MemoryCallback
from tenure.integrations.transformers import AdaptiveTrainer, AdaptiveTrainerMixin
from tenure.integrations.transformers import MemoryCallback as TrainerMemoryCallback
from tenure.paging import (
    PagedModel,
    PagingBudget,
    PagingError,
    PagingPlan,
    PagingReport,
    PagingWarning,
    ShardedModel,
    chunk,
    load_paged,
    page,
    plan_paging,
)
from tenure.profiler import (
    AwayTensorError,
    Courtesy,
    CourtesyError,
    CourtesyReport,
    CourtesyWarning,
    HolderList,
    LineProfiler,
    MemReport,
    MemReporter,
    OomReport,
    ProfilerUsageError,
    ProfilerUsageWarning,
    RecordsDisplay,
    SavedReport,
    Snapshot,
    SnapshotDiff,
    Timeline,
    TimelineReport,
    clear_global_line_profiler,
    holders,
    profile,
    profile_every,
    record_oom,
    saved_for_backward,
    set_target_device,
    set_target_gpu,
    snapshot,
)
from tenure.testing import (
    RaceError,
    Rates,
    Simulator,
    SimulatorUsageError,
    for_each_allocation,
    simulated_accelerator,
)

ERRORS: list[type[TenureError]] = [
    AdaptiveUsageError,
    ProfilerUsageError,
    RaceError,
    ReportFormatError,
    ScopeUsageError,
    SimulatorUsageError,
    tenure.ByteSizeError,
]
WARNINGS: list[type[TenureWarning]] = [
    AdaptiveUsageWarning,
    CourtesyWarning,
    PagingWarning,
    ProfilerUsageWarning,
    ScopeUsageWarning,
]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    x: Tensor
    y: Tensor


# --- scopes


def opening(x: Tensor) -> None:
    with NewDisposeScope("step", policy="report", on_error="keep", capture="stack") as scope:
        assert_type(scope, DisposeScope)
        assert_type(scope.outer, DisposeScope | None)
        assert_type(len(scope), int)
        assert_type(x in scope, bool)
        assert_type(scope.owned(), list[Tensor])
        scope.dispose_everything_but(x, [x])
    assert_type(scope.leaks, LeakReport | None)
    assert_type(statistics().live, int)


def verbs(x: Tensor, scope: DisposeScope) -> None:
    assert_type(move_to_outer(Pair(x, x)), Pair)
    assert_type(detach_from_scope(Batch(x, x)), Batch)
    assert_type(attach_to_scope([x]), list[Tensor])
    assert_type(move_to(scope, {"x": x}), dict[str, Tensor])
    assert_type(move_to(None, x), Tensor)
    assert_type(scope.move_to_outer(x), Tensor)
    assert_type(scope.move_to(None, x), Tensor)
    assert_type(scope.detach(x), Tensor)
    assert_type(scope.attach(x), Tensor)
    assert_type(dispose(x), Tensor)
    assert_type(is_disposed(x), bool)
    assert_type(current_scope(), DisposeScope | None)
    assert_type(owner_of(x), DisposeScope | None)


@scoped
def plain(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@scoped(name="chunks", policy="raise", on_error="keep")
def chunks(x: Tensor) -> list[Tensor]:
    return [*x]


@scoped
async def later(x: Tensor) -> Tensor:
    return x


@persist()
def cached(n: int) -> Tensor:
    with persist():
        return torch.ones(n)


async def functions(x: Tensor) -> str:
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(chunks(x), list[Tensor])
    assert_type(await later(x), Tensor)
    assert_type(cached(2), Tensor)
    try:
        x.sum()
    except DisposedTensorError as error:
        return str(error)
    except ScopeLeakError as error:
        assert_type(error.report, LeakReport | None)
    return f"{tenure.scopes.__name__} {tenure.__version__}"


# --- reports


def writing(leaks: LeakReport) -> None:
    assert_type(leaks.to_dict(), dict[str, object])
    assert_type(LeakReport.from_dict(leaks.to_dict()), LeakReport)
    assert_type(RecordsDisplay.from_dict({}), RecordsDisplay)
    assert_type(PagingReport.from_dict({}), PagingReport)
    predicted = PeakReport.from_dict({}).against("24GiB")
    assert_type(predicted, PeakReport)
    assert_type(predicted.fits(2**30), bool)


def reporting(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    reporter = MemReporter(model, pre_collect=True)
    reporter.add_optimizer(optimizer)
    reporter.print_stats(verbose=True, target_device=0)
    assert_type(reporter.get_stats(), MemReport)
    assert_type(reporter.report(verbose=True, device="cpu"), MemReport)
    assert_type(MemReporter().report_group(), dict[int, MemReport])
    with Timeline() as timeline:
        assert_type(timeline, Timeline)
    assert_type(timeline.report, TimelineReport)
    assert_type(timeline.export("run.json"), Path)


def holding(loss: Tensor) -> None:
    assert_type(saved_for_backward(loss, [loss], {"loss": loss}), SavedReport)
    assert_type(holders(loss), HolderList)
    names: list[str] = holders(nn.Linear(2, 2))
    before = snapshot()
    assert_type(before, Snapshot)
    assert_type(snapshot().diff(before), SnapshotDiff)
    with record_oom(quiet=True) as recorder:
        assert_type(recorder.report, OomReport | None)
    assert names


@profile
def profiled(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@profile_every(10, columns=("hits", "peak"))
def profiled_often(x: Tensor) -> Tensor:
    return x


@profile(columns=["net"])
def profiled_net(x: Tensor) -> int:
    return len(x)


def profiling(x: Tensor) -> None:
    assert_type(profiled(x, scale=2.0), Tensor)
    assert_type(profiled_often(x), Tensor)
    assert_type(profiled_net(x), int)
    with LineProfiler(profiled, nn.Linear(1, 1), device="cpu") as profiler:
        assert_type(profiler, LineProfiler)
    LineProfiler(target_gpu=torch.device("cuda", 1)).add_function(profiled)
    assert_type(profiler.display(["profiled", profiled], columns=("alloc",)), RecordsDisplay)
    profiler.print_stats(profiled, ("hits",))
    set_target_gpu(0)
    set_target_device("cpu")
    clear_global_line_profiler()


def lending(x: Tensor) -> None:
    with Courtesy() as courtesy:
        assert_type(courtesy, Courtesy)
    assert_type(Courtesy(torch.device("cuda", 1)).yield_memory(), CourtesyReport)
    Courtesy("cuda").restore()
    assert_type(courtesy.report, CourtesyReport | None)
    try:
        x.sum()
    except AwayTensorError as error:
        assert_type(error.courtesy, Courtesy | None)
    except CourtesyError as error:
        assert_type(error.courtesy, Courtesy | None)
    tenure.load_ipython_extension(object())


# --- adaptive


def recognising(error: BaseException) -> OomInfo | None:
    assert_type(is_oom(error), bool)
    assert_type(oom_info(error), OomInfo | None)
    with register_oom("pool exhausted", "device", retry_safe=False) as registration:
        assert_type(registration.kind, OomKind)
    return oom_info(error)


@memory_budget(4096)
def limited(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


def limiting(x: Tensor) -> None:
    with memory_budget("64MiB", device=torch.device("cpu")) as budget:
        assert_type(budget, memory_budget)
    assert_type(limited(x, scale=2.0), Tensor)


@batch(initial_batchsize=64, minimum=4, align=4, context=("a", 1), restore_rng=True)
def sized(batch_size: int, x: Tensor, *, scale: float = 1.0) -> list[Tensor]:
    return [x[:batch_size] * scale]


@batch
def bare(batch_size: int, name: str) -> str:
    return name * batch_size


@tenure.adaptive.range(initial_step=64, collect="list")
def walked(start: int, end: int, x: Tensor) -> int:
    return end - start


@chunked(initial_step=64, dimension=1, collect="cat", cache_type=NoBatchsizeCache)
def joined(chunk: Tensor, start: int, end: int, scale: float) -> Tensor:
    return chunk * scale


def total(counts: list[int]) -> float:
    return float(sum(counts))


@chunked(collect=total)
def counted(chunk: Tensor, start: int, end: int) -> int:
    return end - start


class Losses:
    def update(self, loss: Tensor, weight: int = 1) -> None: ...


@chunked(collect=Losses())
def reduced_to(chunk: Tensor, start: int, end: int) -> tuple[Tensor, int]:
    return chunk.sum(), end - start


class Embedder:
    @batch(initial_batchsize=64, on_retry=print)
    def embed(self, batch_size: int, texts: list[str]) -> Tensor:
        return torch.ones(len(texts), batch_size)

    @chunked(collect="list")
    def rows(self, chunk: Tensor, start: int, end: int, *, scale: int = 1) -> Tensor:
        return chunk


def told(event: AdaptiveEvent) -> None:
    assert_type(event.next_size, int | None)


def adapting(x: Tensor, embedder: Embedder) -> None:
    assert_type(sized(x, scale=2.0), list[Tensor])
    assert_type(sized(x, toma_initial_batchsize=8, toma_context="b"), list[Tensor])
    assert_type(sized(x, toma_cache_type=GlobalBatchsizeCache), list[Tensor])
    assert_type(bare("a"), str)
    assert_type(walked(0, 8, x, toma_initial_step=4), Any)
    assert_type(joined(x, 2.0, toma_dimension=0), Any)
    assert_type(counted(x), Any)
    assert_type(reduced_to(x), Any)
    assert_type(embedder.embed(["a"]), Tensor)
    assert_type(embedder.rows(x, scale=2), Any)

    @execute.batch(64)
    def found(batch_size: int) -> str:
        return str(batch_size)

    @execute.range(0, 8, 4, collect="list")
    def pieces(start: int, end: int) -> int:
        return end

    @execute.chunked(x, 4, dimension=1)
    def nothing(chunk: Tensor, start: int, end: int) -> int:
        return end

    assert_type(found, str)
    assert_type(pieces, Any)
    assert_type(nothing, Any)


def calling(x: Tensor) -> None:
    def sizes(batch_size: int, more: str) -> str:
        return more * batch_size

    def ends(start: int, end: int) -> None:
        pass

    def width_of(size: int) -> int:
        return size

    def rows(chunk: Tensor, start: int, end: int) -> None:
        pass

    assert_type(simple.batch(sizes, 64, "more"), str)
    assert_type(explicit.batch(sizes, 64, "more", toma_context="a"), str)
    simple.range(ends, 0, 8, 4)
    explicit.range(ends, 0, 8, 4, toma_cache_type=NoBatchsizeCache)
    simple.chunked(rows, x, 4, 1)
    explicit.chunked(rows, x, 4, toma_dimension=1)
    tenure.adaptive.DEFAULT_CACHE_TYPE = GlobalBatchsizeCache
    found = find_batch_size(
        width_of, low=8, high=64, margin=0, budget="1GiB", align=8, device="cpu", on_retry=told
    )
    assert_type(found, int)
    find_batch_size(width_of, 64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tenure.adaptive.save("sizes.json")
    set_cpu_memory_limit(0.5)


def stepping(x: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].mean()

    def aside(batch: dict[str, Tensor]) -> tuple[Tensor, str]:
        return batch["x"].mean(), "anything"

    def weighed(batch: Batch) -> tuple[Tensor, int]:
        return batch.x.sum(), len(batch.x)

    def named(batch: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        return {"mean": batch.mean(), "other": (batch.sum(), batch.sum())}

    try:
        result = step(loss_of, {"x": x}, weight=lambda batch: len(batch["x"]), model=model)
        assert_type(result, StepResult)
        assert_type(result.terms, Mapping[str, Tensor])
        assert_type(step(aside, {"x": x}, has_aux=True).aux, tuple[Any, ...])
    except BatchCoupledError as error:
        assert_type(error.names, tuple[str, ...])
    except RemoteRankError as remote:
        assert_type(remote.rank, int | None)
    except SplitMismatchError as mismatch:
        assert_type(mismatch.split, float)
    step(weighed, Batch(x, x), scaler=torch.amp.GradScaler("cpu"), minimum=2, maximum=8)
    step(loss_of, {"x": x}, backward=lambda loss: (loss / 4).backward(), verify=False)
    step(named, x, then=lambda terms: terms["mean"].log(), once=lambda: x.sum())
    step(model, x, loss=torch.sum, batchnorm="per_chunk", in_dims=1, out_dims=(0, None))
    step(model, x, loss="sum", in_dims={"x": None}, cache_type=NoBatchsizeCache, context="step")
    assert_type(accelerated_step(object(), loss_of, {"x": x}, maximum=4), StepResult)
    assert_type(check_split(loss_of, {"x": x}, n_samples=4, rtol=1e-6), SplitReport)
    found = tenure.adaptive.plan(loss_of, {"x": x}, "24GiB", margin=0.1, optimizer=optimizer)
    assert_type(found, Plan)
    tenure.adaptive.plan(loss_of, x, "24GiB")  # type: ignore[arg-type]
    tenure.adaptive.plan(loss_of, {"x": x}, 8, loss="avg")  # type: ignore[arg-type]
    first, second = tenure.adaptive.lazy(x, x, batch=0)
    model(first).sub(second).square().mean().backward()
    recorded: LazyTensor = tenure.adaptive.lazy(x)
    assert_type(recorded.value(), Tensor)


# --- paging and testing


def paging(model: nn.Module, x: Tensor) -> None:
    assert_type(load_paged(model, "model.safetensors", "cpu", budget="1GiB"), PagedModel)
    assert_type(load_paged(model, "folder", host=Path("own"), methods=["encode"]), PagedModel)
    assert_type(page(model, "cuda", training=True, activations="host", prefetch=2), PagedModel)
    mesh = init_device_mesh("cpu", (2,))
    assert_type(page(model, mesh=mesh, host="pageable"), ShardedModel)
    page(model, mesh=mesh, budget="1GiB")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    plan = plan_paging(model, "cuda", "64MiB", budget="6GiB", keep=["head"], compute_s=0.1)
    assert_type(plan, PagingPlan)
    with page(model, torch.device("cuda"), budget="80%", methods=("encode",)) as handle:
        assert_type(handle, PagedModel)
        assert_type(handle.model, nn.Module)
        handle(x)
        assert_type(handle.report(), PagingReport)
    shared = PagingBudget("8GiB")
    assert_type(page(model, budget=shared), PagedModel)
    assert_type(chunk(model, "cuda", 10**8), PagedModel)
    try:
        page(model).unpage()
    except PagingError as error:
        assert_type(error.minimum_bytes, int | None)


def testing(work: Callable[[], int]) -> None:
    with simulated_accelerator(budget="1MiB", rates=Rates(flops_per_s=1e9), fail_at=3) as sim:
        assert_type(sim(allocator="cuda", devices=2), Simulator)
        sim.launch_kernel(1e-3, reads=[torch.ones(1)])
        assert_type(for_each_allocation(work, lambda failure: print(failure.error)), int)
    simulated_accelerator(bugdet="1MiB")  # type: ignore[call-arg]
    simulated_accelerator(allocator="native")  # type: ignore[arg-type]


# --- integrations


class Fitting(AdaptiveMixin, LightningModule):
    adaptive_options = {"weight": lambda batch: len(batch), "minimum": 2}  # noqa: RUF012

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("mean", batch.mean(), prog_bar=True)
        return batch.mean()


class Seq2Seq(AdaptiveTrainerMixin, Seq2SeqTrainer):
    adaptive_options = {"minimum": 2}  # noqa: RUF012


def training(trainer: AdaptiveTrainer, module: Fitting) -> None:
    assert_type(trainer.adaptive_result, StepResult | None)
    callback = TrainerMemoryCallback(share=0.1)
    trainer.add_callback(callback)
    Seq2Seq(trainer.model, callbacks=[callback]).train(resume_from_checkpoint=True)
    assert_type(module.adaptive_result, StepResult | None)
    Trainer(callbacks=[MemoryCallback(share=0.1)]).fit(module)
