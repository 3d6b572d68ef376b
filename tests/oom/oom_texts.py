"""Messages as the libraries print them, with what each is: the rows of the recognition matrix.

CPU, shared-memory and numpy texts were printed by torch 2.13.0 and numpy; the others are from
reports of users, shortened at their ends.
"""

from typing import NamedTuple

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
