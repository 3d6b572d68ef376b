"""A graph with a pack hook and a checkpoint, that says which of its functions were run."""

import torch
from torch.utils.checkpoint import checkpoint


def packed_graph(calls):
    """A leaf's double and a loss of it; ``"forward"`` and ``"unpack"`` are added to ``calls``."""

    def body(x):
        calls.append("forward")
        return x.exp()

    def unpack(packed):
        calls.append("unpack")
        return packed

    x = torch.ones(3, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        product = (x * x).sum()
    return x, checkpoint(body, x, use_reentrant=False).sum() + product
