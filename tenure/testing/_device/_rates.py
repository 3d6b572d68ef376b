"""How fast the simulated machine is: the numbers that the virtual clock runs on.

Every field says its unit; none depends on the machine that runs the tests.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds and latencies; the defaults stand for a PCIe 4 x16 link and an A100-like device.

    Attributes:
        h2d_bytes_per_s: host to device, from pinned memory.
        d2h_bytes_per_s: device to host, into pinned memory.
        pageable_bytes_per_s: either way, when the host side is not pinned.
        copy_latency_s: added to each copy over the link.
        flops_per_s: for operations whose arithmetic torch's flop counter knows.
        memory_bytes_per_s: for all others, by the bytes that they read and write.
        kernel_launch_s: the least time that a kernel occupies the device.
        host_launch_s: what the host spends to launch a kernel.
        host_copy_s: what the host spends to start a copy.
        host_poll_s: what the host spends to ask whether work is done.

    Example:
        >>> from tenure.testing import Rates
        >>> Rates(h2d_bytes_per_s=1e9, copy_latency_s=0.0).copy_s(1000, to_device=True, pinned=True)
        1e-06
    """

    h2d_bytes_per_s: float = 24e9
    d2h_bytes_per_s: float = 24e9
    pageable_bytes_per_s: float = 8e9
    copy_latency_s: float = 8e-6
    flops_per_s: float = 150e12
    memory_bytes_per_s: float = 1.3e12
    kernel_launch_s: float = 4e-6
    host_launch_s: float = 8e-6
    host_copy_s: float = 6e-6
    host_poll_s: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_speed = getattr(self, field.name), field.name.endswith("_per_s")
            if not (value > 0 if is_speed else value >= 0):
                least = "more than 0" if is_speed else "0 or more"
                raise ValueError(f"Rates({field.name}={value}): must be {least}.")

    def kernel_s(self, flops: int, n_bytes: int) -> float:
        """Time of one kernel: the slowest of its arithmetic, its memory traffic and its launch."""
        arithmetic_s = flops / self.flops_per_s
        return max(self.kernel_launch_s, arithmetic_s, n_bytes / self.memory_bytes_per_s)

    def copy_s(self, n_bytes: int, *, to_device: bool, pinned: bool) -> float:
        """Time of one copy over the link."""
        pinned_bytes_per_s = self.h2d_bytes_per_s if to_device else self.d2h_bytes_per_s
        bytes_per_s = pinned_bytes_per_s if pinned else self.pageable_bytes_per_s
        return self.copy_latency_s + n_bytes / bytes_per_s
