"""The messages of out-of-memory errors, and of those that only look like one.

Each pattern is searched in linear time, or bounds what it skips: a text may be long and hostile.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

OomKind: TypeAlias = Literal["device", "host", "workspace", "driver", "size_limit"]


class Oom(NamedTuple):
    """What is known of an out-of-memory error before its text is read for numbers."""

    kind: OomKind
    device: str | None = None
    retry_safe: bool = True


# After those of the first three lines the device no longer works, so nothing may be tried again;
# the kernels that Triton refuses need smaller blocks; overflowing sizes are a bug in a shape.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
NEVER_TEXT = re.compile(
    r"illegal memory access|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|the launch timed out|uncorrectable ECC error|hardware stack error"
    r"|illegal instruction|invalid program counter|not supported on global/shared address space"
    r"|out of resources?: |OutOfResources"
    r"|Storage size calculation overflowed|overflow while computing numel"
    r"|integer multiplication overflow"
)
"""What no out-of-memory error says; "device-side assertions" is in the advice of any CUDA error."""

_BACKENDS = r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU|HPU|MPS backend)"

_RULES: tuple[tuple[re.Pattern[str], Oom], ...] = tuple(
    (re.compile(pattern), oom)
    for pattern, oom in (
        # --- what leaves something broken; first, because the texts say "out of memory" as well
        (
            r"\A(?=[\s\S]*(?:\b[NR]CCL\b|\bnccl[A-Z]))"
            r"[\s\S]*(?:out of memory|Failed to CUDA \w*alloc)",
            Oom("device", "cuda", retry_safe=False),
        ),
        (
            r"\b(?:UR|ZE)_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b",
            Oom("driver", "xpu", retry_safe=False),
        ),
        # --- limits of one tensor, which may also name the bytes that they refuse
        (r"\bInvalid buffer size: ", Oom("size_limit", "mps")),
        (r"\blarger than currently supported by the MPS backend\b", Oom("size_limit", "mps")),
        (r"\bcan NOT allocate memory block with size larger than\b", Oom("size_limit", "xpu")),
        (r"(?:\b(?:more|larger|less) than|>) INT_MAX\b", Oom("size_limit")),
        # --- the driver; with MIG, NVML fails where the allocator would report that it is full
        (r"\b(?:CUDA|HIP) driver error: out of memory\b", Oom("driver", "cuda")),
        (r"\bCUDA_ERROR_OUT_OF_MEMORY\b", Oom("driver", "cuda")),
        (r"\bTriton Error \[\w+\]: out of memory\b", Oom("driver", "cuda")),
        (
            r"\b(?:NVML_SUCCESS|handles_\.at\(i\))[^\n]{0,200}?INTERNAL ASSERT FAILED at "
            r"[^\n]{0,300}?CUDACachingAllocator",
            Oom("driver", "cuda"),
        ),
        # --- libraries
        (r"\bMKL error: SPARSE_STATUS_ALLOC_FAILED\b", Oom("workspace", "cpu")),
        (
            r"\b(?:CU|HIP|ROC)[A-Z]{2,10}_(?:\w{1,40}_)?ALLOC(?:ATION)?_FAILED\b",
            Oom("workspace", "cuda"),
        ),
        (r"\bmiopenStatusAllocFailed\b", Oom("workspace", "cuda")),
        (r"\bnvrtc: error: out of memory\b|\bNVRTC_ERROR_OUT_OF_MEMORY\b", Oom("host", "cpu")),
        (r"\bCUDNN_STATUS_NOT_SUPPORTED\b", Oom("workspace", "cuda")),
        (r"(?i:\bunable to find a valid cuDNN algorithm)\b", Oom("workspace", "cuda")),
        (
            r"(?i:\bunable to find an engine to execute this computation)\b",
            Oom("workspace", "cuda"),
        ),
        # --- memory of a device
        (rf"\b{_BACKENDS} out of memory\b", Oom("device")),
        (r"\b\w{1,40}:\d{1,4} out of memory\. Tried to allocate\b", Oom("device")),
        (
            r"\b(?:CUDA|HIP) [Ee]rror(?: \([^\n()]{0,200}\))?: ?out of memory\b",
            Oom("device", "cuda"),
        ),
        (r"\bcuda runtime error \(2\) : out of memory\b", Oom("device", "cuda")),
        # of the backend cudaMallocAsync
        (
            r"\bAllocation on device \d{1,4} would exceed allowed memory\. \(out of memory\)",
            Oom("device", "cuda"),
        ),
        (r"\bMODULE:PT_DEVMEM Allocation failed for size\b", Oom("device", "hpu")),
        (r"\bThere is not enough GPU video memory available\b", Oom("device")),
        (r"\bRESOURCE_EXHAUSTED: Out of memory\b", Oom("device")),
        (r"\AOut of memory allocating [0-9,]{1,30} bytes\b", Oom("device", "cuda")),
        (r"\bstd::bad_alloc: out_of_memory: CUDA error\b", Oom("device", "cuda")),
        # what torch says of a worker or replica whose error it can't build again
        (r"\ACaught OutOfMemoryError in ", Oom("device")),
        # --- memory of the host
        (r"\ACaught \w{0,40}MemoryError in ", Oom("host", "cpu")),
        (
            r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)\b",
            Oom("host", "cpu"),
        ),
        (r"\bunable to mmap [^\n]{1,400}: Cannot allocate memory\b", Oom("host", "cpu")),
        (r"\bunable to mmap memory: you tried to mmap\b", Oom("host", "cpu")),
        (
            r"\bunable to (?:allocate shared memory\(shm\) for file|write to file </torch_)"
            r"[^\n]{1,400}: No space left on device\b",
            Oom("host", "cpu"),
        ),
        (r"\bstd::bad_alloc\b|\Abad allocation\Z", Oom("host", "cpu")),
    )
)


def builtin_oom(text: str) -> Oom | None:
    """What a message is by the first pattern that it fits."""
    return next((oom for pattern, oom in _RULES if pattern.search(text)), None)
