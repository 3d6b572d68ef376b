"""Never run: uses of the public API that mypy and pyright must accept, with the types they give."""

import re
import sys
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
    LeakRecord,
    LeakReport,
    NewDisposeScope,
    ReportFormatError,
    ScopeLeakError,
    ScopeStatistics,
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
    Advice,
    BatchCoupledError,
    GlobalBatchsizeCache,
    LazyTensor,
    NoBatchsizeCache,
    OomInfo,
    OomKind,
    OomRegistration,
    PeakReport,
    Plan,
    RemoteRankError,
    SplitDifference,
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
    PlannedUnit,
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
    DeviceReport,
    DeviceTimeline,
    Finding,
    HolderList,
    HostTimeline,
    LineProfiler,
    LineRecord,
    MemReport,
    MemReporter,
    OomMark,
    OomRecorder,
    OomReport,
    PeakRow,
    ProfilerUsageError,
    ProfilerUsageWarning,
    RecordsDisplay,
    SavedRecord,
    SavedReport,
    ScopeSpan,
    Snapshot,
    SnapshotDiff,
    Stay,
    TensorRow,
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
    AllocationFailure,
    RaceError,
    Rates,
    Simulator,
    SimulatorUsageError,
    for_each_allocation,
    simulated_accelerator,
)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    x: Tensor
    y: Tensor


def opening(x: Tensor) -> None:
    with NewDisposeScope() as scope:
        assert_type(scope, DisposeScope)
    with NewDisposeScope("step", policy="report", on_error="keep", capture="stack") as named:
        assert_type(named.name, str | None)
        assert_type(named.outer, DisposeScope | None)
        assert_type(named.closed, bool)
        assert_type(len(named), int)
        assert_type(x in named, bool)
        assert_type(named.owned(), list[Tensor])
        assert_type(named.live_bytes, int)
        named.dispose_everything()
        named.dispose_everything_but(x, [x])
        named.close()
    assert_type(named.leaks, LeakReport | None)


def verbs(x: Tensor, scope: DisposeScope) -> None:
    assert_type(move_to_outer(x), Tensor)
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
    assert_type(dispose([x]), list[Tensor])
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


async def functions(x: Tensor) -> None:
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(chunks(x), list[Tensor])
    assert_type(await later(x), Tensor)


@persist()
def cached(n: int) -> Tensor:
    with persist():
        return torch.ones(n)


def counting() -> None:
    counters = statistics()
    assert_type(counters, ScopeStatistics)
    assert_type(counters.created_in_scope, int)
    assert_type(counters.disposed_in_scope, int)
    assert_type(counters.released_in_scope, int)
    assert_type(counters.attached_to_scope, int)
    assert_type(counters.detached_from_scope, int)
    assert_type(counters.disposed_outside_scope, int)
    assert_type(counters.live, int)
    assert_type(str(counters), str)
    counters.reset()


def writing(leaks: LeakReport, display: RecordsDisplay, paged: PagingReport) -> None:
    assert_type(leaks.to_dict(), dict[str, object])
    assert_type(LeakReport.from_dict(leaks.to_dict()), LeakReport)
    assert_type(RecordsDisplay.from_dict(display.to_dict()), RecordsDisplay)
    assert_type(PagingReport.from_dict(paged.to_dict()), PagingReport)
    earlier = Snapshot.from_dict(snapshot().to_dict())
    assert_type(earlier, Snapshot)
    assert_type(SnapshotDiff.from_dict(snapshot().diff(earlier).to_dict()), SnapshotDiff)
    assert_type(MemReport.from_dict({}), MemReport)
    assert_type(SavedReport.from_dict({}), SavedReport)
    assert_type(SplitReport.from_dict({}), SplitReport)
    predicted = PeakReport.from_dict({}).against("24GiB")
    assert_type(predicted, PeakReport)
    assert_type(predicted.fits(2**30), bool)
    assert_type(predicted.needed_bytes, int)
    assert_type(CourtesyReport.from_dict({}), CourtesyReport)
    unreadable: list[type[TenureError]] = [ReportFormatError]
    assert unreadable


def reading(report: LeakReport) -> None:
    assert_type(len(report), int)
    assert_type(str(report), str)
    for record in report.records:
        assert_type(record, LeakRecord)
        assert_type(record.shape, tuple[int | str, ...])
        assert_type(record.dtype, torch.dtype)
        assert_type(record.device, torch.device)
        assert_type(record.nbytes, int)
        assert_type(record.created_at, str | None)
        assert_type(record.kind, str)
        for holder in record.holders:
            assert_type(holder, str)


def recognising(error: BaseException) -> OomInfo | None:
    assert_type(is_oom(error), bool)
    assert_type(tenure.adaptive.oom_info(error), OomInfo | None)
    with register_oom("pool exhausted", "device", retry_safe=False) as registration:
        assert_type(registration, OomRegistration)
        assert_type(registration.pattern, re.Pattern[str])
        assert_type(registration.kind, OomKind)
        assert_type(registration.retry_safe, bool)
    try:
        register_oom(re.compile("pool exhausted"), "host").unregister()
    except AdaptiveUsageError as refused:
        assert_type(is_oom(refused), bool)
    info = oom_info(error)
    if info is not None:
        assert_type(info.kind, OomKind)
        assert_type(info.device, str | None)
        assert_type(info.requested_bytes, int | None)
        assert_type(info.retry_safe, bool)
        assert_type(info.text, str)
        assert_type(info.chain, tuple[str, ...])
    return info


@memory_budget(4096)
def limited(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


def limiting(x: Tensor) -> None:
    with memory_budget("64MiB", device=torch.device("cpu")) as budget:
        assert_type(budget, memory_budget)
        assert_type(budget.limit_bytes, int)
        assert_type(budget.live_bytes, int)
        assert_type(budget.peak_bytes, int)
        assert_type(budget.device, torch.device)
    assert_type(limited(x, scale=2.0), Tensor)
    errors: list[type[TenureError]] = [AdaptiveUsageError, tenure.ByteSizeError]
    assert errors


def paging_from_disk(model: torch.nn.Module) -> None:
    assert_type(load_paged(model, "model.safetensors", "cpu", budget="1GiB"), PagedModel)
    with load_paged(model, Path("folder"), torch.device("cuda"), 10, keep=("head",)) as handle:
        assert_type(handle, PagedModel)
    assert_type(page(model, "cpu", host=Path("folder"), prefetch=2), PagedModel)
    assert_type(page(model, "cuda", methods=("encode", "text.decode")), PagedModel)
    assert_type(page(model, "cuda", training=True, activations="host"), PagedModel)
    mesh = init_device_mesh("cpu", (2,))
    sharded = page(model, mesh=mesh, host="pageable")
    assert_type(sharded, ShardedModel)
    assert_type(sharded.sharded, tuple[str, ...])
    page(model, mesh=mesh, budget="1GiB")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert_type(load_paged(model, "folder", host=Path("own"), methods=["encode"]), PagedModel)
    assert_type(plan_paging(model, "cpu", host=Path("folder"), link_bytes_per_s=5e9), PagingPlan)


def reporting(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    reporter = MemReporter(model, pre_collect=True)
    reporter.add_optimizer(optimizer)
    reporter.collect_tensor()
    reporter.print_stats(verbose=True, target_device=0)
    assert_type(reporter.get_stats(), MemReport)
    report = reporter.report(verbose=True, device="cpu")
    assert_type(report, MemReport)
    assert_type(report.categories, dict[str, int])
    assert_type(report.unexplained_bytes, int)
    assert_type(report.total_bytes, int)
    assert_type(report.devices, tuple[DeviceReport, ...])
    assert_type(report.rows, tuple[TensorRow, ...])
    assert_type(report.to_dict(), dict[str, object])
    assert_type(MemReporter().report_group(), dict[int, MemReport])


def recording_memory() -> None:
    with Timeline() as timeline:
        assert_type(timeline, Timeline)
    report = timeline.report
    assert_type(report, TimelineReport)
    assert_type(report.devices, tuple[DeviceTimeline, ...])
    assert_type(report.devices[0].by_category, dict[str, tuple[int, ...]])
    assert_type(report.devices[0].at_peak, tuple[PeakRow, ...])
    assert_type(report.scopes, tuple[ScopeSpan, ...])
    assert_type(report.ooms, tuple[OomMark, ...])
    assert_type(report.host, HostTimeline)
    assert_type(timeline.export("run.json"), Path)


def holding(loss: Tensor) -> None:
    saved = saved_for_backward(loss, [loss], {"loss": loss})
    assert_type(saved, SavedReport)
    assert_type(saved.total_bytes, int)
    assert_type(saved.records, tuple[SavedRecord, ...])
    assert_type(holders(loss), HolderList)
    names: list[str] = holders(loss)
    assert_type(holders(nn.Linear(2, 2)), HolderList)
    assert_type(holders(loss)[0], str)
    before = snapshot()
    assert_type(before, Snapshot)
    change = snapshot().diff(before)
    assert_type(change, SnapshotDiff)
    assert_type(change.total_bytes, int)
    assert_type(change.findings, tuple[Finding, ...])
    with record_oom(quiet=True) as recorder:
        assert_type(recorder, OomRecorder)
    assert_type(recorder.report, OomReport | None)
    assert_type(record_oom().reports, tuple[OomReport, ...])
    error: type[TenureError] = ProfilerUsageError
    assert names, error


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
    with LineProfiler(profiled, torch.nn.Linear(1, 1), device="cpu") as profiler:
        assert_type(profiler, LineProfiler)
    LineProfiler(target_gpu=torch.device("cuda", 1)).add_function(profiled)
    profiler.enable()
    profiler.disable()
    profiler.clear()
    profiler.device = torch.device("cpu")
    assert_type(profiler.device, torch.device)
    assert_type(profiler.enabled, bool)
    assert_type(profiler.functions, tuple[str, ...])
    display = profiler.display(["profiled", profiled], columns=("alloc", "active_bytes.all.peak"))
    assert_type(display, RecordsDisplay)
    profiler.print_stats(profiled, ("hits",), sys.stderr)
    for record in profiler.records:
        assert_type(record, LineRecord)
        assert_type(record.function, str)
        assert_type(record.line, int)
        assert_type(record.hits, int)
        assert_type(record.allocated_bytes, int)
        assert_type(record.freed_bytes, int)
        assert_type(record.net_bytes, int)
        assert_type(record.peak_bytes, int)
        assert_type(record.exact, bool)
    set_target_gpu(0)
    set_target_device("cpu")
    clear_global_line_profiler()
    wrong: list[type[tenure.TenureError]] = [ProfilerUsageError]
    odd: list[type[tenure.TenureWarning]] = [AdaptiveUsageWarning, ProfilerUsageWarning]
    assert wrong
    assert odd


@batch(initial_batchsize=64, minimum=4, align=4, context=("a", 1), restore_rng=True)
def sized(batch_size: int, x: Tensor, *, scale: float = 1.0) -> list[Tensor]:
    return [x[:batch_size] * scale]


@batch
def bare(batch_size: int, name: str) -> str:
    return name * batch_size


@tenure.adaptive.range(initial_step=64)
def walked(start: int, end: int, x: Tensor) -> int:
    return end - start


@tenure.adaptive.range(collect="list")
def listed(start: int, end: int) -> str:
    return f"{start}-{end}"


@chunked(initial_step=64, dimension=1, collect="cat", cache_type=NoBatchsizeCache)
def joined(chunk: Tensor, start: int, end: int, scale: float) -> Tensor:
    return chunk * scale


def total(counts: list[int]) -> float:
    return float(sum(counts))


@chunked(collect=total)
def counted(chunk: Tensor, start: int, end: int) -> int:
    return end - start


@chunked(collect="host")
def on_host(chunk: Tensor, start: int, end: int) -> Tensor:
    return chunk


class Losses:
    def update(self, loss: Tensor, weight: int = 1) -> None: ...


@chunked(collect=Losses())
def reduced_to(chunk: Tensor, start: int, end: int) -> tuple[Tensor, int]:
    return chunk.sum(), end - start


class Embedder:
    @batch(initial_batchsize=64, on_retry=print)
    def embed(self, batch_size: int, texts: list[str]) -> Tensor:
        return torch.ones(len(texts), batch_size)

    @tenure.adaptive.range(collect="list")
    def parts(self, start: int, end: int) -> bytes:
        return b""

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
    assert_type(walked(0, 8, x), Any)
    assert_type(walked(0, 8, x, toma_initial_step=4), Any)
    assert_type(listed(0, 8), Any)
    assert_type(joined(x, 2.0), Any)
    assert_type(joined(x, 2.0, toma_dimension=0), Any)
    assert_type(counted(x), Any)
    assert_type(on_host(x), Any)
    assert_type(reduced_to(x), Any)
    assert_type(embedder.embed(["a"]), Tensor)
    assert_type(embedder.parts(0, 4), Any)
    assert_type(embedder.rows(x, scale=2), Any)
    batch(initial_batchsize=8, on_retry=told, maximum=64)

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
    assert_type(find_batch_size(width_of, high=8), int)
    find_batch_size(
        width_of, low=8, high=64, margin=0, budget="1GiB", align=8, device="cpu", on_retry=told
    )
    find_batch_size(width_of, high=64, align=8)
    find_batch_size(width_of, 64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tenure.adaptive.reset()
    tenure.adaptive.save("sizes.json")
    tenure.adaptive.load("sizes.json")
    set_cpu_memory_limit(0.5)


def stepping(x: Tensor, model: nn.Module) -> None:
    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].mean()

    def aside(batch: dict[str, Tensor]) -> tuple[Tensor, str]:
        return batch["x"].mean(), "anything"

    def counted(batch: Batch) -> tuple[Tensor, int]:
        return batch.x.sum(), len(batch.x)

    def named(batch: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        return {"mean": batch.mean(), "other": (batch.sum(), batch.sum())}

    try:
        result = step(loss_of, {"x": x}, weight=lambda batch: len(batch["x"]), model=model)
        assert_type(result, StepResult)
        assert_type(result.loss, Tensor)
        assert_type(result.terms, Mapping[str, Tensor])
        assert_type(result.micro_batch, int)
        assert_type(result.sizes, tuple[int, ...])
        assert_type(result.attempts, int)
        assert_type(step(aside, {"x": x}, has_aux=True).aux, tuple[Any, ...])
        assert_type(step(loss_of, None, group=None, per_rank=True).n_samples, int)
    except BatchCoupledError as error:
        assert_type(error.names, tuple[str, ...])
    except RemoteRankError as remote:
        assert_type(remote.rank, int | None)
        assert_type(remote.cause, str)
    except SplitMismatchError as mismatch:
        assert_type(mismatch.whole, float)
        assert_type(mismatch.split, float)
        assert_type(mismatch.advice, str)
    step(loss_of, {"x": x}, verify=False, predict=True)
    step(counted, Batch(x, x), scaler=torch.amp.GradScaler("cpu"), minimum=2, maximum=8)
    step(loss_of, {"x": x}, backward=Tensor.backward)
    assert_type(accelerated_step(object(), loss_of, {"x": x}, maximum=4), StepResult)
    step(loss_of, {"x": x}, backward=lambda loss: (loss / 4).backward())
    step(named, x, then=lambda terms: terms["mean"].log(), once=lambda: x.sum())
    step(model, x, loss=torch.sum, batchnorm="per_chunk", in_dims=1, out_dims=(0, None))
    step(model, x, loss="sum", in_dims={"x": None}, cache_type=NoBatchsizeCache, context="step")
    report = check_split(loss_of, {"x": x}, n_samples=4, rtol=1e-6)
    assert_type(report, SplitReport)
    assert_type(report.ok, bool)
    for difference in report.differences:
        assert_type(difference, SplitDifference)
        assert_type(difference.relative_error, float)
        assert_type(difference.name, str)


def lending(x: Tensor) -> None:
    with Courtesy() as courtesy:
        assert_type(courtesy, Courtesy)
        assert_type(courtesy.device, torch.device | None)
        assert_type(courtesy.away_bytes, int)
    assert_type(Courtesy(torch.device("cuda", 1)).yield_memory(), CourtesyReport)
    Courtesy("cuda").restore()
    report = courtesy.report
    assert_type(report, CourtesyReport | None)
    if report is not None:
        assert_type(report.moved_bytes, int)
        assert_type(report.stays_bytes, int)
        for stay in report.stays:
            assert_type(stay, Stay)
            assert_type(stay.reason, str)
    try:
        x.sum()
    except AwayTensorError as error:
        assert_type(error.courtesy, Courtesy | None)
    except CourtesyError as error:
        assert_type(error.courtesy, Courtesy | None)
    warnings: list[type[TenureWarning]] = [CourtesyWarning]
    assert warnings
    tenure.load_ipython_extension(object())


def failing(x: Tensor) -> str:
    try:
        x.sum()
    except DisposedTensorError as error:
        return str(error)
    except ScopeLeakError as error:
        assert_type(error.report, LeakReport | None)
    except (ScopeUsageError, TenureError):
        pass
    warnings: list[type[TenureWarning]] = [ScopeUsageWarning, tenure.TenureWarning]
    return f"{tenure.scopes.__name__} {tenure.__version__} {warnings}"


def testing(work: Callable[[], int]) -> None:
    with simulated_accelerator(budget="1MiB", rates=Rates(flops_per_s=1e9), fail_at=3) as sim:
        assert_type(sim, Simulator)
        assert_type(sim(allocator="cuda", devices=2), Simulator)
        assert_type(sim.device, torch.device)
        assert_type(sim.peak_bytes, int)
        assert_type(sim.elapsed_s, float)
        sim.launch_kernel(1e-3, reads=[torch.ones(1)])
        assert_type(for_each_allocation(work, lambda failure: print(failure.error)), int)
    simulated_accelerator(bugdet="1MiB")  # type: ignore[call-arg]
    simulated_accelerator(allocator="native")  # type: ignore[arg-type]
    errors: list[type[TenureError]] = [RaceError, SimulatorUsageError]
    assert errors
    assert_type(AllocationFailure(1, None, 2).number, int)


def paging(model: torch.nn.Module, x: Tensor) -> None:
    plan = plan_paging(model, "cuda", "64MiB", budget="6GiB", keep=["head"], compute_s=0.1)
    assert_type(plan, PagingPlan)
    told = plan_paging(model, "cuda", inputs=(torch.ones(2),), training=True, activations="host")
    assert_type(told.peak_bytes, int | None)
    assert_type(told.activation_bytes, int | None)
    assert_type(plan.units, tuple[PlannedUnit, ...])
    assert_type(plan.minimum_bytes, int)
    with page(model, torch.device("cuda"), budget="80%", host="pageable", prefetch=2) as handle:
        assert_type(handle, PagedModel)
        assert_type(handle.model, torch.nn.Module)
        assert_type(handle.plan, PagingPlan)
        handle(x)
        report = handle.report()
        assert_type(report, PagingReport)
        assert_type(report.share_of_limit, float)
        assert_type(report.helpful_budget_bytes, int | None)
        assert_type(handle.closed, bool)
    shared = PagingBudget("8GiB")
    assert_type(page(model, budget=shared), PagedModel)
    assert_type(page(model, budget="auto", training=True), PagedModel)
    assert_type(load_paged(model, "folder", budget=shared), PagedModel)
    assert_type(plan_paging(model, budget=PagingBudget(10**9)), PagingPlan)
    assert_type(shared.limit_bytes, int | None)
    assert_type(shared.held_bytes, int)
    assert_type(chunk(model, "cuda", 10**8), PagedModel)
    try:
        page(model).unpage()
    except PagingError as error:
        assert_type(error.minimum_bytes, int | None)
    assert issubclass(PagingWarning, TenureWarning)


def planning(model: torch.nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = model(batch["x"])
        return y.square().mean()

    found = tenure.adaptive.plan(loss_of, {"x": x}, "24GiB", margin=0.1, optimizer=optimizer)
    assert_type(found, Plan)
    assert_type(found.micro_batch, int)
    assert_type(found.sizes, tuple[int, ...])
    assert_type(found.advice, tuple[Advice, ...])
    assert_type(found.advice[0].how, str)
    assert_type(found.to_dict(), dict[str, object])
    tenure.adaptive.plan(loss_of, x, "24GiB")  # type: ignore[arg-type]
    tenure.adaptive.plan(loss_of, {"x": x}, 8, loss="avg")  # type: ignore[arg-type]


def recording(model: torch.nn.Module, x: Tensor, y: Tensor) -> None:
    first, second = tenure.adaptive.lazy(x, y, batch=0)
    model(first).sub(second).square().mean().backward()
    recorded: LazyTensor = tenure.adaptive.lazy(x)
    assert_type(recorded.value(), Tensor)


class Fitting(AdaptiveMixin, LightningModule):
    adaptive_options = {"weight": lambda batch: len(batch), "minimum": 2}  # noqa: RUF012

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("mean", batch.mean(), prog_bar=True)
        return batch.mean()


class Seq2Seq(AdaptiveTrainerMixin, Seq2SeqTrainer):
    adaptive_options = {"minimum": 2}  # noqa: RUF012


def training(trainer: AdaptiveTrainer) -> None:
    assert_type(trainer.adaptive_result, StepResult | None)
    trainer.adaptive_options = {"maximum": 8}
    callback = TrainerMemoryCallback(share=0.1)
    assert_type(callback.report(), str)
    trainer.add_callback(callback)
    Seq2Seq(trainer.model, callbacks=[callback]).train(resume_from_checkpoint=True)


def integrating(module: Fitting) -> None:
    assert_type(module.adaptive_result, StepResult | None)
    callback = MemoryCallback(share=0.1)
    assert_type(callback, MemoryCallback)
    assert_type(callback.report(), str)
    Trainer(callbacks=[callback]).fit(module)
