"""Never run: uses of the public API that mypy and pyright must accept, with the types they give."""

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, assert_type

import torch
from torch import Tensor

import tenure
from tenure import (
    DisposedTensorError,
    DisposeScope,
    LeakRecord,
    LeakReport,
    NewDisposeScope,
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
    AdaptiveUsageError,
    OomInfo,
    OomKind,
    OomRegistration,
    is_oom,
    memory_budget,
    oom_info,
    register_oom,
)
from tenure.paging import PagedModel, PagingPlan, load_paged, page, plan_paging


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
    dispose(x, [x])
    assert_type(is_disposed(x), bool)
    assert_type(current_scope(), DisposeScope | None)
    assert_type(owner_of(x), DisposeScope | None)


@scoped
def plain(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@scoped(name="chunks", policy="raise")
def chunks(x: Tensor) -> Iterator[Tensor]:
    yield from x


@scoped
async def later(x: Tensor) -> Tensor:
    return x


@scoped(on_error="keep")
async def streamed(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


async def functions(x: Tensor) -> None:
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(chunks(x), Iterator[Tensor])
    assert_type(await later(x), Tensor)
    async for item in streamed(x):
        assert_type(item, Tensor)


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


def reading(report: LeakReport) -> None:
    assert_type(len(report), int)
    assert_type(str(report), str)
    for record in report.records:
        assert_type(record, LeakRecord)
        assert_type(record.shape, tuple[int, ...])
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
    assert_type(plan_paging(model, "cpu", host=Path("folder"), link_bytes_per_s=5e9), PagingPlan)


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
