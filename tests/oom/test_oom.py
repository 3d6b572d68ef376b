"""What is recognised, what never is, where in a chain it may stand, and patterns of users."""

import asyncio
import gc
import pickle
import re
import weakref
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from tenure import ScopeUsageError, TenureError
from tenure.adaptive import AdaptiveUsageError, OomInfo, is_oom, oom_info, register_oom
from tests.threads import on_thread

# Messages as the libraries print them, with what each is. CPU, shared-memory and numpy texts were
# printed by torch 2.13.0 and numpy; the others are from reports of users, shortened at their ends.
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


class Row(NamedTuple):
    text: str
    kind: str
    device: str | None
    requested_bytes: int | None = None
    retry_safe: bool = True


CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 23.69 GiB of "
    "which 5.25 GiB is free. Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch "
    "memory, this process has 18.17 GiB memory in use."
)
CUDA_MALLOC_ASYNC_OOM = (
    "Allocation on device 1 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 14.27 GiB\nRequested               : 4.00 GiB\n"
)
CUDA_ERROR_OOM = (
    "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
_IN_ALLOCATOR = 'INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":8, '
_TRACEBACK = "Original Traceback (most recent call last):\n    output = module(*input)\n"
_CPU_LINUX = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 536870912 bytes. Error code 12 (Cannot allocate memory)"
)
_CPU_WINDOWS = (
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."  # of 8 GiB
)
_MPS = "MPS backend out of memory (MPS allocated: 16.91 GB, max allowed: 18.13 GB). "
_REJECTED = "CUDA out of memory. Allocation was preemptively rejected. Requested size: 20.00 MiB. "
_NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1333, unhandled cuda error, NCCL version 2.19.3\n"
_XPU_BLOCK = (
    "Current platform can NOT allocate memory block with size larger than 4GB! "
    "Tried to allocate 5.50 GiB (GPU  0; 15.56 GiB total capacity)"
)
_NUMPY_IN_A_WORKER = (
    f"Caught _ArrayMemoryError in DataLoader worker process 0.\n{_TRACEBACK}"
    "_ArrayMemoryError: Unable to allocate 128. TiB for an array with shape (1048576, 16777216)"
)

ROWS = (
    Row(CUDA_OOM, "device", "cuda:1", 20 * GIB),
    Row("CUDA out of memory. Tried to allocate 6.00 MiB (GPU 0;", "device", "cuda:0", 6 * MIB),
    Row("CUDA out of memory. Tried to allocate more than 1EB memory.", "device", "cuda"),
    Row("HIP out of memory. Tried to allocate 6.00 MiB. GPU 0 has", "device", "cuda:0", 6 * MIB),
    Row("XPU out of memory. Tried to allocate 5.00 MiB. GPU 0 has", "device", "xpu:0", 5 * MIB),
    Row("NPU out of memory. Tried to allocate 2.00 MiB (NPU 0;", "device", "npu:0", 2 * MIB),
    Row(f"{_MPS}Tried to allocate 1.25 GB on private pool.", "device", "mps", 5 * GIB // 4),
    Row(f"{_MPS}Tried to allocate 256 bytes on shared pool.", "device", "mps", 256),
    Row(CUDA_MALLOC_ASYNC_OOM, "device", "cuda:1", 4 * GIB),
    Row(f"{_REJECTED}GPU 0 has a total capacity", "device", "cuda:0", 20 * MIB),
    Row("MODULE:PT_DEVMEM Allocation failed for size::212366 (2)MB", "device", "hpu", 212_366),
    Row(CUDA_ERROR_OOM, "device", "cuda"),
    Row("CUDA error (flash_fwd_launch_template.h:188): out of memory", "device", "cuda"),
    Row("cuda runtime error (2) : out of memory at /THCTensorRandom.cu:25", "device", "cuda"),
    Row(
        "Could not allocate tensor with 2348 bytes. There is not enough GPU video memory available",
        *("device", None, 2348),
    ),
    Row("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4 bytes.", "device", None, 4),
    Row(f"Caught OutOfMemoryError in replica 0 on device 0.\n{_TRACEBACK}", "device", None),
    Row(f"{_NCCL}Cuda failure 2 'out of memory'", "device", "cuda", retry_safe=False),
    Row(f"{_NCCL}Failed to CUDA calloc 6291456 bytes", "device", "cuda", 6 * MIB, retry_safe=False),
    Row("CUDA driver error: out of memory", "driver", "cuda"),
    Row("Triton Error [CUDA]: out of memory", "driver", "cuda"),
    Row(f"NVML_SUCCESS == r {_IN_ALLOCATOR}", "driver", "cuda"),
    Row(f"handles_.at(i) {_IN_ALLOCATOR}", "driver", "cuda"),
    Row("error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "driver", "xpu", retry_safe=False),
    Row("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c", "workspace", "cuda"),
    Row("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "workspace", "cuda"),
    Row("cuFFT error: CUFFT_ALLOC_FAILED", "workspace", "cuda"),
    Row("MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_`", "workspace", "cpu"),
    Row("Invalid buffer size: 9.75 GB", "size_limit", "mps", 39 * GIB // 4),
    Row("is larger than currently supported by the MPS backend: 72250", "size_limit", "mps"),
    Row(_XPU_BLOCK, "size_limit", "xpu:0", 11 * GIB // 2),
    Row("nonzero is not supported for more than INT_MAX elements", "size_limit", None),
    Row("src size > INT_MAX is not supported", "size_limit", None),
    Row(_CPU_LINUX, "host", "cpu", 512 * MIB),
    Row(_CPU_WINDOWS, "host", "cpu", 8 * GIB),
    Row(_NUMPY_IN_A_WORKER, "host", "cpu", 128 * TIB),
    Row("unable to mmap 64 bytes from file </t_1>: Cannot allocate memory (12)", "host", "cpu", 64),
    Row("unable to mmap memory: you tried to mmap 5GB.", "host", "cpu", 5 * GIB),
    Row(
        "unable to allocate shared memory(shm) for file </t>: No space left on device",
        "host",
        "cpu",
    ),
    Row("unable to write to file </torch_1_1>: No space left on device (28)", "host", "cpu"),
    Row("nvrtc: error: out of memory", "host", "cpu"),
    Row("CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY", "host", "cpu"),
    Row("std::bad_alloc", "host", "cpu"),
    Row("bad allocation", "host", "cpu"),
    # an exact number beats the rounded one, and a number that is none is left out
    Row(
        "sim:0 out of memory. Tried to allocate 64.00 KiB (65540 bytes).", "device", "sim:0", 65540
    ),
    Row(f"CUDA out of memory. Tried to allocate {'9' * 5000} bytes.", "device", "cuda"),
)

OFTEN_OOM = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. If",
    "CUDA error: insufficient resources when calling `cusparseCreate(handle)`",
    "CUDA error: initialization error when calling `cusparseCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear in a non-contiguous input.",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
)
"""What a library says that got no handle or no algorithm, for want of memory or another reason."""

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
LOOK_ALIKES = (
    ILLEGAL_ACCESS,
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: operation not supported on global/shared address space",
    "out of resource: shared memory, Required: 180224, Hardware limit: 101376.",
    "Storage size calculation overflowed with sizes=[4611686018427387904]",
    "numel: integer multiplication overflow",
    "int64 overflow while computing numel for sizes [2, 2305843009213693952]",
)

OTHERS = (
    "",
    f"captures_underway.empty() {_IN_ALLOCATOR}",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/Devices.cpp":1',
    "CUDA error: operation not permitted when stream is capturing",
    "CUDA error: insufficient resources when calling `cusparseSpGEMM_compute( handle, opA`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle`",
    "unable to mmap 16 bytes from file <weights.bin>: Permission denied (13)",
    "unable to write to file <weights.bin>: No space left on device (28)",
    "it is recommended to pass in `INT_MAX`.",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    f"{_NCCL}unhandled system error",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
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
