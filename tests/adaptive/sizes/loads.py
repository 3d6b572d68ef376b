"""Work whose memory is a formula of its size, within a memory budget."""

import torch
from hypothesis import strategies as st

from tenure.adaptive import memory_budget


class Load:
    """Work that fits up to a size: it allocates fixed bytes, and bytes per piece by layers.

    Attributes:
        limit: the bytes of the budget it is called in.
        power: how the bytes of all pieces grow with the size.
        own: the bytes besides, for what a step keeps: the gradient, the loss of each micro-batch.
        cut: what fragments add, which no count of what is in use shows.
        sizes: those that were run.
    """

    def __init__(self, limit, piece, fixed=0, n_layers=1, power=1.0, cut=1.0):
        self.limit, self.piece, self.fixed = limit, piece, fixed
        self.n_layers, self.power, self.cut = n_layers, power, cut
        self.sizes, self.failed, self.own = [], [], 0

    @property
    def largest(self):
        """The largest size that fits."""
        left = self.limit / self.cut - self.fixed
        return int((left / (self.piece * self.n_layers)) ** (1 / self.power) + 1e-9)

    def __call__(self, size, *_):
        self.sizes.append(size)
        of_layer = int(size**self.power * self.piece)
        total = self.fixed + self.n_layers * of_layer
        try:
            parts = [self.fixed, *[of_layer] * self.n_layers]
            held = [torch.empty(n_bytes, dtype=torch.uint8) for n_bytes in parts]
            if total * self.cut > self.limit:
                held.append(torch.empty(self.limit + self.own - total + 1, dtype=torch.uint8))
        except torch.OutOfMemoryError:
            self.failed.append(size)
            raise
        return size

    def budget(self):
        """A block in which this is the memory."""
        return memory_budget(self.limit + self.own)


class Limited:
    """Work that fits up to a size, and whose errors tell nothing; it notes the sizes."""

    def __init__(self, largest=16):
        self.largest, self.sizes = largest, []

    def __call__(self, size, *args, **kwargs):
        self.sizes.append(size)
        if size > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return size

    def tried(self):
        """The sizes since this was called last."""
        tried, self.sizes = self.sizes, []
        return tried


@st.composite
def loads(draw, most_initial=60.0, most_fixed=0.3, powers=(1.0, 1.0), cuts=(1.0,)):
    """A load, and an initial size of up to so many times what fits."""
    limit, cut = draw(st.integers(10**6, 10**8)), draw(st.sampled_from(cuts))
    fixed = int(limit / cut * draw(st.floats(0, most_fixed)))
    power, n_layers = draw(st.floats(*powers)), draw(st.integers(1, 8))
    # what is left over is too little for one more, and so is what a step is given for its own
    most = min(10**4, int(limit / cut - fixed) // 1024)
    largest = draw(st.integers(20, most)) + draw(st.floats(0.1, 0.9))
    piece = (limit / cut - fixed) / n_layers / largest**power
    load = Load(limit, piece, fixed, n_layers, power, cut)
    load.own = 512
    return load, max(1, int(load.largest * draw(st.floats(1.0, most_initial))))
