"""Devices without memory: what a size needs is a formula, and each failure is counted."""

from dataclasses import dataclass, field

from tenure.adaptive import OomInfo
from tenure.adaptive._sizes._limits import SizeLimits
from tenure.adaptive._sizes._record import SizeRecord
from tenure.adaptive._sizes._search import AdaptiveSearch


def oom(device=None, requested_bytes=None, kind="device"):
    return OomInfo(kind, device, requested_bytes, True, "out of memory", ("RuntimeError",))


class Memory:
    """What is known of one site, kept in the open."""

    def __init__(self):
        self.record = None

    def known(self):
        return self.record

    def new(self):
        self.record = self.record or SizeRecord()
        return self.record


@dataclass
class Device:
    """A device on which a size needs fixed bytes and bytes per piece, made layer by layer.

    Attributes:
        power: how the bytes of all pieces grow with the size.
        vary: gives the share by which they differ from run to run.
    """

    free_bytes: int
    piece_bytes: int
    fixed_bytes: int = 0
    n_layers: int = 1
    power: float = 1
    vary: object = float
    peak_bytes: int = 0
    n_ooms: int = 0

    @property
    def largest(self):
        """The largest size that fits."""
        n_bytes = self.free_bytes - self.fixed_bytes
        return int((n_bytes / (self.piece_bytes * self.n_layers)) ** (1 / self.power) + 1e-9)

    def run(self, size):
        """None if it fits, or what the failed allocation wanted."""
        used_bytes = 0
        of_layer = int(size**self.power * self.piece_bytes * (1 + self.vary()))
        for layer_bytes in (self.fixed_bytes, *[of_layer] * self.n_layers):
            if used_bytes + layer_bytes > self.free_bytes:
                self.n_ooms += 1
                return oom("fake:0", layer_bytes)
            used_bytes += layer_bytes
            self.peak_bytes = max(self.peak_bytes, used_bytes)
        return None

    # --- as a meter

    def available_bytes(self):
        return self.free_bytes

    def restart(self):
        self.peak_bytes = 0

    def needed_bytes(self):
        return self.peak_bytes

    @property
    def measures(self):
        return True


@dataclass
class Wall:
    """A largest size, and errors that tell nothing."""

    largest: int
    n_ooms: int = 0

    def run(self, size):
        if size <= self.largest:
            return None
        self.n_ooms += 1
        return oom()


@dataclass
class Site:
    """One call in a program, made again and again."""

    device: object
    initial: int
    limits: SizeLimits = field(default_factory=SizeLimits)
    in_pieces: bool = False
    memory: Memory = field(default_factory=Memory)
    sizes: list = field(default_factory=list)

    def step(self, _=None):
        """The size of a call that tries sizes out first; None where nothing fits."""
        search = AdaptiveSearch(self.initial, self.limits, self.memory, has_trials=True)
        while True:
            self.sizes.append(search.size)
            if (info := self.device.run(search.size)) is not None:
                if not search.shrink(info):
                    return None
            elif search.is_trial:
                search.tried()
            else:
                search.succeeded()
                search.finished()
                return search.size

    def call(self, n_pieces=1):
        """The size of the last piece that worked; None where nothing fits."""
        search = AdaptiveSearch(self.initial, self.limits, self.memory, in_pieces=self.in_pieces)
        done = None
        for _ in range(n_pieces):
            while (info := self.device.run(search.size)) is not None:
                self.sizes.append(search.size)
                before = search.size
                if not search.shrink(info):
                    return None
                assert self.limits.floor <= search.size < before
                assert search.size % self.limits.align == 0
            done = search.size
            self.sizes.append(done)
            search.succeeded()
            if search.room is not None:
                search.go_on(search.room)
        search.finished()
        return done
