"""Messages as the libraries print them, with what each is: the rows of the recognition matrix.

CPU, shared-memory and numpy texts were printed by torch 2.13.0 and numpy; the others are from
reports of users, shortened at their ends.
"""

from typing import NamedTuple

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


class Row(NamedTuple):
    name: str
    text: str
    kind: str
    device: str | None
    requested_bytes: int | None = None
    retry_safe: bool = True


_CUDA_ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 23.69 GiB of "
    "which 5.25 GiB is free. Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch "
    "memory, this process has 18.17 GiB memory in use. Of the allocated memory 17.88 GiB is "
    "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
CUDA_MALLOC_ASYNC_OOM = (
    "Allocation on device 1 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 14.27 GiB\n"
    "Requested               : 4.00 GiB\n"
    "Device limit            : 14.58 GiB\n"
    "Free (according to CUDA): 15.62 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB"
)
CUDA_ERROR_OOM = f"CUDA error: out of memory{_CUDA_ADVICE}"
_TRACEBACK = """Original Traceback (most recent call last):
  File "torch/nn/parallel/parallel_apply.py", line 96, in _worker
    output = module(*input, **kwargs)
"""
_CPU_LINUX = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 536870912 bytes. Error code 12 (Cannot allocate memory)"
)

ROWS = (
    # --- device
    Row("cuda", CUDA_OOM, "device", "cuda:1", 20 * GIB),
    Row(
        "cuda before 2.1",
        "CUDA out of memory. Tried to allocate 360.00 MiB (GPU 0; 10.76 GiB total capacity; 643.57 "
        "MiB already allocated; 8.20 GiB free; 32.43 MiB cached)",
        "device",
        "cuda:0",
        360 * MIB,
    ),
    Row(
        "cuda, absurd",
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        "device",
        "cuda",
    ),
    Row(
        "hip",
        "HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 15.98 GiB",
        "device",
        "cuda:0",
        256 * MIB,
    ),
    Row(
        "xpu",
        "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB. "
        "Of the allocated memory 16.50 GiB is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached "
        "memory.",
        "device",
        "xpu:0",
        512 * MIB,
    ),
    Row(
        "npu",
        "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 "
        "GiB already allocated;",
        "device",
        "npu:0",
        52 * MIB,
    ),
    Row(
        "mps",
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max "
        "allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may "
        "cause system failure).",
        "device",
        "mps",
        292 * MIB + 512 * 1024,
    ),
    Row(
        "mps, binary GB",
        "MPS backend out of memory (MPS allocated: 16.91 GB, other allocations: 2.77 MB, max "
        "allowed: 18.13 GB). Tried to allocate 1.25 GB on private pool.",
        "device",
        "mps",
        GIB + GIB // 4,
    ),
    Row(
        "mps, bytes",
        "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max "
        "allowed: 18.13 GB). Tried to allocate 256 bytes on shared pool.",
        "device",
        "mps",
        256,
    ),
    Row("cudaMallocAsync", CUDA_MALLOC_ASYNC_OOM, "device", "cuda:1", 4 * GIB),
    Row(
        "cuda, before asking the driver",
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 20.00 MiB. GPU 0 has a total capacity",
        "device",
        "cuda:0",
        20 * MIB,
    ),
    Row(
        "Gaudi",
        "[Rank:7] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::2123366400 (2025)MB",
        "device",
        "hpu",
        2_123_366_400,
    ),
    Row("CUDA error", CUDA_ERROR_OOM, "device", "cuda"),
    Row("HIP error", "HIP error: out of memory\nHIP kernel errors might be", "device", "cuda"),
    Row(
        "cuda runtime error",
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25",
        "device",
        "cuda",
    ),
    Row(
        "DirectML",
        "Could not allocate tensor with 234881024 bytes. There is not enough GPU video memory "
        "available!",
        "device",
        None,
        234_881_024,
    ),
    Row(
        "XLA",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 402653184 bytes.",
        "device",
        None,
        402_653_184,
    ),
    Row(
        "DataParallel",
        f"Caught OutOfMemoryError in replica 1 on device 1.\n{_TRACEBACK}"
        f"torch.OutOfMemoryError: {CUDA_OOM}",
        "device",
        "cuda:1",
        20 * GIB,
    ),
    Row(
        "CUDA error with a place",
        "CUDA error (flash_fwd_launch_template.h:188): out of memory",
        "device",
        "cuda",
    ),
    Row(
        "DataParallel, no reason",
        f"Caught OutOfMemoryError in replica 0 on device 0.\n{_TRACEBACK}",
        "device",
        None,
    ),
    Row(
        "NCCL",
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'",
        "device",
        "cuda",
        retry_safe=False,
    ),
    Row(
        "NCCL calloc",
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error, NCCL version 2.27.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nFailed to CUDA calloc 6291456 bytes",
        "device",
        "cuda",
        6_291_456,
        retry_safe=False,
    ),
    # --- driver
    Row("CUDA driver", f"CUDA driver error: out of memory{_CUDA_ADVICE}", "driver", "cuda"),
    Row("Triton launch", "Triton Error [CUDA]: out of memory", "driver", "cuda"),
    Row(
        "MIG",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, '
        "please report a bug to PyTorch. ",
        "driver",
        "cuda",
    ),
    Row(
        "MIG, device query",
        "NVML_SUCCESS == DriverAPI::get()->nvmlDeviceGetHandleByPciBusId_v2_( pci_id, "
        '&nvml_device) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":815, '
        "please report a bug to PyTorch. ",
        "driver",
        "cuda",
    ),
    Row(
        "expandable segments",
        'handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":396, '
        "please report a bug to PyTorch. ",
        "driver",
        "cuda",
    ),
    Row(
        "Level Zero",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "driver",
        "xpu",
        retry_safe=False,
    ),
    # --- workspace
    Row(
        "cuBLAS",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "workspace",
        "cuda",
    ),
    Row("cuDNN", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "workspace", "cuda"),
    Row(
        "cuDNN 9",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "workspace",
        "cuda",
    ),
    Row("cuFFT", "cuFFT error: CUFFT_ALLOC_FAILED", "workspace", "cuda"),
    Row(
        "cuSOLVER",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "workspace",
        "cuda",
    ),
    Row("hipBLAS", "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling", "workspace", "cuda"),
    Row("MKL", "MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_`", "workspace", "cpu"),
    # --- size_limit
    Row("MPS buffer", "Invalid buffer size: 24.00 GiB", "size_limit", "mps", 24 * GIB),
    Row(
        "MPS buffer, binary GB", "Invalid buffer size: 9.75 GB", "size_limit", "mps", 39 * GIB // 4
    ),
    Row(
        "MPS matmul",
        "Output size of the matrix multiplication is larger than currently supported by the MPS "
        "backend: 72250,72250, needs to be less than 2**32 elements",
        "size_limit",
        "mps",
    ),
    Row(
        "XPU block",
        "Current platform can NOT allocate memory block with size larger than 4GB! Tried to "
        "allocate 5.50 GiB (GPU  0; 15.56 GiB total capacity; 556.67 MiB already allocated; 2.70 "
        "GiB reserved in total by PyTorch)",
        "size_limit",
        "xpu:0",
        11 * GIB // 2,
    ),
    Row(
        "INT_MAX",
        "nonzero is not supported for tensors with more than INT_MAX elements,   file a support "
        "request",
        "size_limit",
        None,
    ),
    Row("INT_MAX, oneDNN", "src size > INT_MAX is not supported", "size_limit", None),
    # --- host
    Row("CPU, Linux", _CPU_LINUX, "host", "cpu", 512 * MIB),
    Row(
        "CPU, Windows",
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 8589934592 bytes.",
        "host",
        "cpu",
        8 * GIB,
    ),
    Row(
        "DataLoader worker",
        f"Caught RuntimeError in DataLoader worker process 0.\n{_TRACEBACK}"
        f"RuntimeError: {_CPU_LINUX}",
        "host",
        "cpu",
        512 * MIB,
    ),
    Row(
        "numpy in a DataLoader worker",
        f"Caught _ArrayMemoryError in DataLoader worker process 0.\n{_TRACEBACK}"
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 128. TiB for an array with "
        "shape (1048576, 16777216) and data type float64",
        "host",
        "cpu",
        128 * TIB,
    ),
    Row(
        "mmap",
        "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate "
        "memory (12)",
        "host",
        "cpu",
        29_764,
    ),
    Row(
        "mmap of old",
        "$ Torch: unable to mmap memory: you tried to mmap 5GB.",
        "host",
        "cpu",
        5 * GIB,
    ),
    Row(
        "shared memory",
        "unable to allocate shared memory(shm) for file </torch_24205_3925649779_0>: No space left "
        "on device (28)",
        "host",
        "cpu",
    ),
    Row(
        "shared memory, write",
        "unable to write to file </torch_18692_1954506624>: No space left on device (28)",
        "host",
        "cpu",
    ),
    Row("NVRTC, its log", "nvrtc: error: out of memory", "host", "cpu"),
    Row("NVRTC", "CUDA NVRTC error: NVRTC_ERROR_OUT_OF_MEMORY", "host", "cpu"),
    Row("C++", "std::bad_alloc", "host", "cpu"),
    Row("C++, Windows", "bad allocation", "host", "cpu"),
)

OFTEN_OOM = {
    "cuBLAS": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuSOLVER": (
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. "
        "If you keep seeing this error, you may use `torch.backends.cuda.preferred_linalg_library"
    ),
    "cuSPARSE": "CUDA error: insufficient resources when calling `cusparseCreate(handle)`",
    "cuSPARSE, begun": "CUDA error: initialization error when calling `cusparseCreate(handle)`",
    "cuSPARSE, by name": (
        "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseCreate(handle)`"
    ),
    "hipBLAS": "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN, not supported": (
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input."
    ),
    "no algorithm": "Unable to find a valid cuDNN algorithm to run convolution",
    "no engine": "GET was unable to find an engine to execute this computation",
    "no engine, tried": (
        "FIND was unable to find an engine to execute this computation after trying 3 plans."
    ),
}
"""What a library says that got no handle or no algorithm, for want of memory or another reason."""

LOOK_ALIKES = {
    "illegal access": (f"CUDA error: an illegal memory access was encountered{_CUDA_ADVICE}"),
    "device assert": f"CUDA error: device-side assert triggered{_CUDA_ADVICE}",
    "launch failure": f"CUDA error: unspecified launch failure{_CUDA_ADVICE}",
    "launch timeout": f"CUDA error: the launch timed out and was terminated{_CUDA_ADVICE}",
    "ECC": f"CUDA error: uncorrectable ECC error encountered{_CUDA_ADVICE}",
    "stack": f"CUDA error: hardware stack error{_CUDA_ADVICE}",
    "instruction": f"CUDA error: an illegal instruction was encountered{_CUDA_ADVICE}",
    "program counter": f"CUDA error: invalid program counter{_CUDA_ADVICE}",
    "address space": (
        f"CUDA error: operation not supported on global/shared address space{_CUDA_ADVICE}"
    ),
    "Triton": (
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376. Reducing block "
        "sizes or `num_stages` may help."
    ),
    "storage overflow": "Storage size calculation overflowed with sizes=[4611686018427387904]",
    "numel multiplication": "numel: integer multiplication overflow",
    "numel overflow": "int64 overflow while computing numel for sizes [2, 2305843009213693952]",
}

OTHERS = {
    "empty": "",
    "assert elsewhere": (
        'captures_underway.empty() INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp'
        '":3022, please report a bug to PyTorch. '
    ),
    "NVML elsewhere": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/Devices.cpp":1',
    "capture": f"CUDA error: operation not permitted when stream is capturing{_CUDA_ADVICE}",
    "capture, before": (
        f"CUDA error: operation failed due to a previous error during capture{_CUDA_ADVICE}"
    ),
    "capture, isolated": (
        "CUDA error: dependency created on uncaptured work in another stream" + _CUDA_ADVICE
    ),
    "random state": "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.",
    "descriptor": (
        "CUDA error: insufficient resources when calling `cusparseSpGEMM_compute( handle, opA`"
    ),
    "cuDNN": "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "driver": "CUDA error: initialization error",
    "library": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle`",
    "mmap of a file": "unable to mmap 16 bytes from file <weights.bin>: Permission denied (13)",
    "disk": "unable to write to file <weights.bin>: No space left on device (28)",
    "slicing": "it is recommended to pass in `INT_MAX`.",
    "device lost": "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "NCCL": "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error, NCCL version 2.19.3",
    "shape": "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
}
