"""Errors of the CUDA runtime: its codes, their texts, and the last one of each thread.

A runtime function that fails returns its code and keeps it as its thread's last error. Who reads
only the code leaves the error behind. Torch looks for one after each kernel launch and before each
new segment, so the next of these in that thread raises it, although nothing is wrong there.
"""

import threading

import torch

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713

# What cudaGetErrorName and cudaGetErrorString of CUDA 13.0 answer.
_ERRORS = {
    SUCCESS: ("cudaSuccess", "no error"),
    INVALID_VALUE: ("cudaErrorInvalidValue", "invalid argument"),
    OUT_OF_MEMORY: ("cudaErrorMemoryAllocation", "out of memory"),
    ALREADY_REGISTERED: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped",
    ),
    NOT_REGISTERED: (
        "cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region",
    ),
}
# c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp of torch 2.13, as its wheels are built.
_HELP = (
    "\nSearch for `{name}' in"
    " https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nFor more detailed error information, run with CUDA_LOG_FILE=stderr"
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def error_string(code: int) -> str:
    """Return what `cudaGetErrorString` says of a code."""
    return _ERRORS[code][1]


def error_of(code: int) -> torch.AcceleratorError:
    """Return the error that torch raises for a code."""
    name, text = _ERRORS[code]
    error = torch.AcceleratorError(f"CUDA error: {text}{_HELP.format(name=name)}")
    error.error_code = code  # type: ignore[attr-defined] # as torch's own has, though it is untyped
    return error


class LastError:
    """The last error of each thread, as `cudaGetLastError` knows it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the errors of all threads."""
        self._of_thread = threading.local()

    def note(self, code: int) -> int:
        """Keep a code that a runtime function returns to this thread, if it is a failure."""
        if code != SUCCESS:
            self._of_thread.code = code
        return code

    def clear(self) -> int:
        """Take this thread's last error away; returns its code."""
        code = getattr(self._of_thread, "code", SUCCESS)
        self._of_thread.code = SUCCESS
        return code

    def check(self) -> None:
        """Raise the last error and clear it, as torch does around launches and segments.

        Raises:
            torch.AcceleratorError: a runtime function of this thread has failed since.
        """
        code = self.clear()
        if code != SUCCESS:
            raise error_of(code)


last_error = LastError()
