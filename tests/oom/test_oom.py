"""What is recognised, what never is, where in a chain it may stand, and patterns of users."""

import asyncio
import gc
import pickle
import re
import weakref

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from tenure import ScopeUsageError, TenureError, adaptive
from tenure.adaptive import AdaptiveUsageError, OomInfo, is_oom, oom_info, register_oom
from tests.threads import on_thread

from .oom_texts import (
    CUDA_ERROR_OOM,
    CUDA_MALLOC_ASYNC_OOM,
    CUDA_OOM,
    GIB,
    ILLEGAL_ACCESS,
    LOOK_ALIKES,
    MIB,
    OFTEN_OOM,
    OTHERS,
    ROWS,
)

_ASYNC_BYTES = 8_000_000_000


def _oom():
    return torch.OutOfMemoryError(CUDA_OOM)


def _caused(exc, cause):
    exc.__cause__ = cause
    return exc


def _in_context(exc, context):
    exc.__context__ = context
    return exc


def _accelerator_error(text, code):
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


def _facts(info):
    return info.kind, info.device, info.requested_bytes, info.retry_safe


# --- texts


@pytest.mark.parametrize("row", ROWS, ids=[row.text[:30] for row in ROWS])
def test_a_runtime_error_a_text_and_a_log_tell_the_same_and_other_types_nothing(row):
    assert oom_info(RuntimeError(row.text)) == OomInfo(
        kind=row.kind,
        device=row.device,
        requested_bytes=row.requested_bytes,
        retry_safe=row.retry_safe,
        text=row.text,
        chain=("RuntimeError",),
    )
    for before in ("", "epoch 1\n[rank0]: RuntimeError: "):
        assert _facts(oom_info(before + row.text)) == row[1:]
    assert not is_oom(ValueError(row.text))


@pytest.mark.parametrize("text", [*LOOK_ALIKES, *OTHERS], ids=lambda text: text[:30])
def test_another_error_and_what_only_looks_like_it_is_not_recognised(free, text):
    free(0)
    assert oom_info(RuntimeError(text)) is None
    assert oom_info(text) is oom_info(f"RuntimeError: {text}") is None


def test_of_a_log_the_last_message_of_an_error_of_memory_counts():
    texts = ["torch.OutOfMemoryError: " + CUDA_OOM, "MemoryError", "ValueError: no", "done"]
    assert oom_info("\n".join(texts)).chain == ("MemoryError",)
    texts[1] = f"RuntimeError: {ILLEGAL_ACCESS}"
    info = oom_info("\n".join(texts))
    assert (info.device, info.text) == ("cuda:1", CUDA_OOM)
    assert info.chain == ("torch.OutOfMemoryError",)
    assert oom_info("a line of a log\n" * 10_000 + CUDA_OOM).requested_bytes == 20 * GIB


def test_a_huge_text_is_read_at_both_ends_and_kept_shortened():
    filler = "frame of a stack trace\n" * 100_000
    for text in (CUDA_OOM + filler, filler + CUDA_OOM):
        info = oom_info(RuntimeError(text))
        assert (info.kind, info.device) == ("device", "cuda:1")
        assert len(info.text) < 17_000
        assert "\n[...]\n" in info.text


# --- a library without a handle or an algorithm tells no reason: the memory that is free does


@pytest.fixture
def free(monkeypatch):
    """Three devices: the current one is not in use, the next has room, the last what is told."""

    def tell(free_bytes, *, initialized=True, fraction=1.0):
        free = {1: 40 * GIB, 2: free_bytes}

        def mem_get_info(device):
            assert initialized, "this would bring a context to life"
            assert device.index in free, "this would bring a context to life"
            if free[device.index] is None:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return free[device.index], 80 * GIB

        def allowed(device):
            return fraction if device.index == 2 else 1.0

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        reserved = lambda device: 20 * MIB * (device.index in free)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", allowed)

    return tell


@pytest.mark.parametrize("text", OFTEN_OOM, ids=lambda text: text[:30])
def test_a_library_that_fails_wants_memory_only_where_little_is_free(free, text):
    free(40 * MIB)
    assert _facts(oom_info(RuntimeError(text))) == ("workspace", "cuda:2", None, True)
    assert oom_info(ValueError(text)) is None
    # much is free, the device is broken, and it is not in use
    for others in ({"free_bytes": 2 * GIB}, {"free_bytes": None}):
        free(**others)
        assert oom_info(RuntimeError(text)) is None
    free(0, initialized=False)
    assert oom_info(RuntimeError(text)) is None
    # memory that the process may not use is not free
    free(2 * GIB, fraction=1 / 400)
    assert oom_info(RuntimeError(text)).device == "cuda:2"


def test_another_error_of_cudnn_is_raised_at_once(free):
    free(2 * GIB)
    tried = []

    @adaptive.batch(initial_batchsize=64)
    def work(size):
        tried.append(size)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. non-contiguous input")

    with pytest.raises(RuntimeError, match="non-contiguous input"):
        work()
    assert tried == [64]


# --- types


class MyOom(torch.OutOfMemoryError, TenureError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "device", "requested_bytes"),
    [
        (_oom(), "device", "cuda:1", 20 * GIB),
        (torch.OutOfMemoryError(""), "device", None, None),
        (torch.OutOfMemoryError(CUDA_MALLOC_ASYNC_OOM), "device", "cuda:1", 4 * GIB),
        (torch.OutOfMemoryError("std::bad_alloc"), "device", None, None),
        (MyOom("no room"), "device", None, None),
        (MemoryError(), "host", "cpu", None),
        (
            MemoryError("Out of memory allocating 8,000,000,000 bytes (allocated"),
            *("device", "cuda", _ASYNC_BYTES),
        ),
        (MemoryError("std::bad_alloc: out_of_memory: CUDA error at: "), "device", "cuda", None),
        (_accelerator_error("a text of a later torch", 2), "device", None, None),
        (torch.AcceleratorError(CUDA_ERROR_OOM), "device", "cuda", None),
        (OSError(12, "Cannot allocate memory"), "host", "cpu", None),
    ],
    ids=repr,
)
def test_a_type_that_says_it_needs_no_text(error, kind, device, requested_bytes):
    assert _facts(oom_info(error)) == (kind, device, requested_bytes, True)


@pytest.mark.parametrize(
    "error",
    [
        _accelerator_error(ILLEGAL_ACCESS, 700),
        _accelerator_error(ILLEGAL_ACCESS, True),
        OSError(28, "No space left on device"),
        RuntimeError(),
    ],
    ids=repr,
)
def test_another_code_is_none(error):
    assert not is_oom(error)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without distributed")
def test_a_failed_communicator_is_recognised_and_not_to_be_tried_again():
    error = torch.distributed.DistBackendError("CUDA driver error: out of memory")
    assert oom_info(error).retry_safe is False


# --- what is never one


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_an_interrupt_passes_whatever_stands_below_it_or_beside_it(kind):
    assert not is_oom(_caused(kind(CUDA_OOM), _oom()))
    assert not is_oom(_in_context(kind(), _oom()))
    assert not is_oom(_in_context(RuntimeError("clean-up"), _in_context(kind(), _oom())))
    inner = BaseExceptionGroup("inner", [_oom(), kind()])
    assert not is_oom(BaseExceptionGroup("outer", [_oom(), inner]))


@pytest.mark.parametrize(
    "exc",
    [
        AssertionError(CUDA_OOM),
        ScopeUsageError(CUDA_OOM),
        AdaptiveUsageError(CUDA_OOM),
        RuntimeError(ILLEGAL_ACCESS),
        ValueError("out of resource: shared memory"),
    ],
    ids=repr,
)
def test_what_is_never_one_hides_what_stands_below_it(exc):
    assert not is_oom(exc)
    assert not is_oom(_caused(exc, _oom()))
    assert not is_oom(_caused(ValueError("wrapped"), exc))
    assert not is_oom(ExceptionGroup("before", [exc, _oom()]))
    assert not is_oom(ExceptionGroup("after", [_oom(), exc]))
    assert is_oom(_in_context(_oom(), exc))


# --- chains


def test_the_cause_comes_before_the_context_and_a_suppressed_one_is_not_looked_at():
    exc = _in_context(ValueError("unrelated"), _oom())
    assert is_oom(exc)
    assert not is_oom(_caused(exc, None))  # as `raise ... from None` does
    exc = _in_context(_caused(ValueError(), MemoryError()), _oom())
    exc.__suppress_context__ = False
    assert oom_info(exc).kind == "host"
    assert oom_info(_caused(MemoryError("the uppermost"), _oom())).text == "the uppermost"


def test_a_cycle_ends_and_a_long_chain_needs_no_deep_stack():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_oom(first)
    second.__context__, second.__suppress_context__ = _oom(), False
    assert oom_info(first).chain == ("ValueError", "ValueError", "torch.OutOfMemoryError")
    exc = _oom()
    for _ in range(20_000):
        exc = _caused(ValueError(), exc)
    assert len(oom_info(exc).chain) == 20_001


def test_of_a_group_the_one_not_to_be_tried_again_is_told():
    broken = RuntimeError("NCCL error: Cuda failure 2 'out of memory'")
    for members in ([_oom(), broken], [broken, _oom()]):
        assert oom_info(ExceptionGroup("ranks", members)).retry_safe is False


# --- hostile exceptions


def test_exceptions_whose_own_code_fails_are_read_all_the_same():
    def fail(_):
        raise ValueError("no attribute")

    class MuteOom(torch.OutOfMemoryError):
        __str__ = fail

    assert oom_info(MuteOom(CUDA_OOM)).text == ""
    names = ("__cause__", "__context__", "__suppress_context__", "exceptions", "__class__")
    hostile = type("Hostile", (RuntimeError,), {name: property(fail) for name in names})
    assert oom_info(hostile(CUDA_OOM)).kind == "device"
    chained = hostile("wrapped")
    BaseException.__cause__.__set__(chained, _oom())
    assert oom_info(chained).kind == "device"


# --- what is told


def test_it_keeps_neither_the_exception_nor_its_tensors():
    class Wordy(RuntimeError):
        """A class of Python's own allows no weak reference."""

    def failed():
        activations = torch.ones(8)
        try:
            raise Wordy(CUDA_OOM, activations)
        except Wordy as error:
            references.extend(map(weakref.ref, (activations, error)))
            return oom_info(error)

    references = []
    gc.disable()
    try:
        info = failed()
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    assert pickle.loads(pickle.dumps(info)) == info


@pytest.mark.parametrize(
    ("call", "value", "described"),
    [
        (oom_info, None, "an object of type NoneType"),
        (is_oom, MemoryError, "the class MemoryError"),
    ],
)
def test_what_is_no_exception_is_named(call, value, described):
    message = rf"^{call.__name__}\(\) wants an exception, and got {described}\. Pass the one"
    with pytest.raises(AdaptiveUsageError, match=message):
        call(value)


# --- patterns of users

_EXHAUSTED = RuntimeError("pool exhausted on npu:0, Tried to allocate 3.00 MiB")


def test_a_registration_counts_on_every_thread_until_it_is_taken_back():
    registration = register_oom("pool exhausted", "device", retry_safe=False)
    assert repr(registration) == "<OomRegistration 'pool exhausted' as 'device', registered>"
    with registration:
        seen = on_thread(oom_info, _EXHAUSTED)
    assert _facts(seen) == ("device", None, 3 << 20, False)
    assert not is_oom(_EXHAUSTED)
    registration.unregister()
    assert repr(registration).endswith("taken back>")


def test_the_newest_registration_wins_and_comes_before_what_is_built_in():
    error = RuntimeError(CUDA_OOM)

    def kind_with(pattern, kind):
        with register_oom(pattern, kind):
            raise KeyError(oom_info(error).kind)

    with register_oom("CUDA out of memory", "host"):
        for pattern, kind in (
            ("out of memory", "size_limit"),
            (re.compile("cuda OUT", re.IGNORECASE), "driver"),
        ):
            with pytest.raises(KeyError, match=kind):
                kind_with(pattern, kind)
            assert oom_info(error).kind == "host"
    assert oom_info(error).kind == "device"


def test_it_is_asked_for_runtime_errors_only_after_the_type_and_what_never_is_one():
    with register_oom("pool exhausted|illegal|assert", "host"):
        assert not is_oom(ValueError("pool exhausted"))
        assert oom_info(torch.OutOfMemoryError("pool exhausted")).kind == "device"
        assert not is_oom(RuntimeError(ILLEGAL_ACCESS))
        assert not is_oom(AssertionError("assert"))


@pytest.mark.parametrize(
    ("pattern", "kind", "message"),
    [
        ("exhausted (pool", "device", r"is no regular expression: missing \), .* re\.escape\(\)"),
        ("x*", "device", r"^register_oom\(\) got the pattern 'x\*', which fits any text"),
        (re.compile(b"pool"), "device", r"wants a regular expression over str, and got one of ty"),
        (None, "device", r"got one of type NoneType\. Write it as text, such as r'pool exhausted'"),
        ("pool exhausted", "gpu", "^kind='gpu' is not one of 'device', 'host', 'workspace', "),
        ("pool exhausted", None, "^kind=None is not one of 'device', "),
    ],
)
def test_what_can_not_be_registered_is_refused(pattern, kind, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        register_oom(pattern, kind)
    assert not is_oom(_EXHAUSTED)


class _Unallocatable(list):
    def __getitem__(self, index):
        return numpy.empty((2**20, 2**36))


@pytest.mark.parametrize(
    ("call", "requested_bytes"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), 2**60),
        (lambda: numpy.empty((2**20, 2**36)), 2**59),
        (lambda: torch.UntypedStorage._new_shared(2**60), None),
        (lambda: [0] * 2**60, None),
        (lambda: next(iter(DataLoader(_Unallocatable([0]), num_workers=1))), 2**59),
    ],
    ids=["torch", "numpy", "shared memory", "python", "a worker of a data loader"],
)
def test_memory_of_the_host(call, requested_bytes):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        call()
    info = oom_info(caught.value)
    assert (info.kind, info.device, info.requested_bytes) == ("host", "cpu", requested_bytes)
    assert info.retry_safe
