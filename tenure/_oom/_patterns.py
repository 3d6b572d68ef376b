"""The texts of out-of-memory errors: which they are, how many bytes were wanted, and where.

Each built-in pattern is searched in linear time, or bounds what it skips: a text may be long and
hostile. Users register patterns for backends of their own; the tuple of registrations is replaced
under a lock and never changed, so that threads read it without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

from tenure._errors import AdaptiveUsageError, ByteSizeError
from tenure._text import parse_bytes

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
    """Classify a message by the first pattern that it fits."""
    return next((oom for pattern, oom in _RULES if pattern.search(text)), None)


# C++ stack traces follow the message, and a worker's traceback stands before it.
_KEPT = 8 * 1024
MOST_OF_TEXT = 2 * _KEPT
"""The characters of a message that are read."""
_CUT = "\n[...]\n"

_NUMBER = r"([0-9][0-9,]{0,30}(?:\.[0-9]{0,30})?)"
_SIZE = rf"{_NUMBER} ?(bytes|[KMGTPE]i?B)\b"
# In the order of their use: where a text has the exact number as well, it stands first here.
_REQUESTS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Tried to allocate [0-9.]+ [KMGTPE]?i?B \({_NUMBER} (bytes)\)",
        rf"(?i:tried|trying) to (?:allocate|mmap) {_SIZE}",
        rf"Invalid buffer size: {_SIZE}",
        rf"Unable to allocate {_SIZE}",
        rf"unable to mmap {_SIZE}",
        rf"Could not allocate tensor with {_SIZE}",
        rf"Out of memory allocating {_SIZE}",
        rf"Failed to CUDA \w*alloc(?: async)? {_SIZE}",
        rf"\bRequested(?: size)?\s{{0,40}}: {_SIZE}",
        rf"Allocation failed for size::{_NUMBER}()",
    )
)
_FREE = re.compile(rf"\bof which (?:[0-9.]+ [KMGTPE]?i?B \()?{_SIZE}\)? is free\b")
_UNALLOCATED = re.compile(rf"\b{_SIZE} is reserved by PyTorch but unallocated\b")
# What a budget, a simulated device and CUDA say of their size; the exact number where there is one.
_LIMITS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?:limit|budget) of [^(]{{1,20}}\({_SIZE}\)",
        rf"(?:limit|budget|total capacity) of {_SIZE}",
    )
)
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
# The allocators' GB of 2**30 bytes: older MPS and mmap texts say 19.45 GB for 19.45 GiB.
# https://github.com/pytorch/pytorch/issues/141909
_DECIMAL_UNIT = re.compile(r"([KMGTPE])B")

_PLACE = re.compile(r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU|HPU|MPS)(?: backend)? out of memory\b")
_NAMED_PLACE = re.compile(r"\b([A-Za-z]\w{0,40}:[0-9]{1,4}|cpu) out of memory\b")
_INDEX = re.compile(r"\b(?:GPU|NPU|XPU|MUSA|MLU|HPU|device)  ?([0-9]{1,4})\b")


def text_of(exc: BaseException) -> str:
    """Return the message of an exception, shortened in its middle; empty if it has none."""
    try:
        # exactly a str: a subclass may hold what the exception holds
        text = str.__str__(str(exc))
    # whatever the exception's own __str__ raises, its type still tells
    except Exception:
        return ""
    if len(text) <= MOST_OF_TEXT:
        return text
    return text[:_KEPT] + _CUT + text[-_KEPT:]


def type_name(exc: BaseException) -> str:
    """Return the type as tracebacks print it, such as ``torch.OutOfMemoryError``."""
    kind = type(exc)
    try:
        module, name = str.__str__(kind.__module__), str.__str__(kind.__qualname__)
    # a class may be built with anything in the place of these texts
    except Exception:
        return "<unknown type>"
    return name if module == "builtins" else f"{module}.{name}"


def requested_bytes_in(text: str) -> int | None:
    """Return the bytes that an allocation asked for, in any unit that allocators print."""
    return _bytes_of(text, *_REQUESTS) or None


def free_bytes_in(text: str) -> int | None:
    """Return the bytes that were free when the allocation failed, as the text says."""
    return _bytes_of(text, _FREE)


def allowed_bytes_in(text: str) -> int | None:
    """Return the bytes of a device that a fraction allows the process, as CUDA prints them."""
    return _bytes_of(text, _ALLOWED)


def limit_bytes_in(text: str) -> int | None:
    """Return how much there is in all: what is allowed, a budget, a limit or the whole device."""
    return _bytes_of(text, _ALLOWED, *_LIMITS)


def own_bytes_in(text: str) -> int | None:
    """Return the bytes of a device that the process itself has, as CUDA prints them."""
    return _bytes_of(text, _OWN)


def unallocated_bytes_in(text: str) -> int | None:
    """Return the bytes that the allocator cached when it failed, as CUDA and XPU print them."""
    return _bytes_of(text, _UNALLOCATED)


def device_in(text: str, default: str | None) -> str | None:
    """Return the device that a text names, as torch spells it, or the one that its rule knows."""
    if named := _NAMED_PLACE.search(text):
        return named[1]
    place = _PLACE.search(text)
    device = place[1].lower().replace("hip", "cuda") if place else default
    index = None if device in (None, "cpu", "mps") else _INDEX.search(text)
    return f"{device}:{index[1]}" if index else device


def _bytes_of(text: str, *patterns: re.Pattern[str]) -> int | None:
    """Return the number in what the first pattern finds that finds anything."""
    match = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    if match is None:
        return None
    number, unit = match[1].replace(",", ""), _DECIMAL_UNIT.sub(r"\1iB", match[2] or "bytes")
    try:
        return parse_bytes(f"{number} {unit}")
    except ByteSizeError:
        return None


_lock = Lock()
_registered: tuple[OomRegistration, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OomRegistration:
    """A pattern that counts as out of memory until it is taken back; made by `register_oom`.

    As a context it is taken back at the end of the block.

    Attributes:
        pattern: what is searched for in the text of each RuntimeError.
        kind: the `OomInfo.kind` of what it finds.
        retry_safe: the `OomInfo.retry_safe` of what it finds.
    """

    pattern: re.Pattern[str]
    kind: OomKind
    retry_safe: bool

    def unregister(self) -> None:
        """Take the pattern back; a second time does nothing."""
        global _registered
        with _lock:
            _registered = tuple(other for other in _registered if other is not self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def __repr__(self) -> str:
        state = "registered" if self in _registered else "taken back"
        return f"<OomRegistration {self.pattern.pattern!r} as {self.kind!r}, {state}>"


def register_oom(
    pattern: str | re.Pattern[str], kind: OomKind, *, retry_safe: bool = True
) -> OomRegistration:
    """Count the RuntimeErrors of a backend as out of memory, on all threads of the process.

    The newest registration is asked first, and all of them before what is built in. What is never
    an out-of-memory error stays none.

    Args:
        pattern: a regular expression, searched for in the text of the error.
        kind: what ran out, see `OomInfo`.
        retry_safe: whether work can be tried again after it.

    Returns:
        The registration: ``unregister()`` takes it back, and so does the end of a ``with`` block.

    Raises:
        AdaptiveUsageError: the pattern is no regular expression or fits every text, or the kind is
            unknown. Nothing was registered.

    Example:
        >>> from tenure.adaptive import is_oom, register_oom
        >>> with register_oom(r"NPU pool exhausted", "device"):
        ...     is_oom(RuntimeError("NPU pool exhausted (3 of 3 blocks)"))
        True
        >>> is_oom(RuntimeError("NPU pool exhausted (3 of 3 blocks)"))
        False
    """
    global _registered
    registration = OomRegistration(_compiled(pattern), _checked_kind(kind), bool(retry_safe))
    with _lock:
        _registered = (registration, *_registered)
    return registration


def registered_oom(text: str) -> Oom | None:
    """Classify a text by the newest registration that fits it."""
    for registration in _registered:
        if registration.pattern.search(text):
            return Oom(registration.kind, retry_safe=registration.retry_safe)
    return None


def _compiled(pattern: object) -> re.Pattern[str]:
    written = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(written, str):
        raise AdaptiveUsageError(
            "register_oom() wants a regular expression over str, and got one of type "
            f"{type(written).__name__}. Write it as text, such as r'pool exhausted'."
        )
    try:
        compiled: re.Pattern[str] = re.compile(pattern)  # type: ignore[call-overload]  # as checked
    except (re.error, RecursionError, OverflowError) as error:
        raise AdaptiveUsageError(
            f"register_oom() got the pattern {written!r}, which is no regular expression: {error}. "
            "Escape plain text with re.escape()."
        ) from error
    # a pattern such as "a|" or ".*" is a slip of the pen, and would make each error one of memory
    if compiled.search(""):
        raise AdaptiveUsageError(
            f"register_oom() got the pattern {written!r}, which fits any text, so that every "
            "RuntimeError would count as out of memory. Write what only this error says."
        )
    return compiled


def _checked_kind(kind: object) -> OomKind:
    for known in get_args(OomKind):
        if kind == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the literal
    raise AdaptiveUsageError(
        f"kind={kind!r} is not one of {', '.join(map(repr, get_args(OomKind)))}."
    )
