"""Graphs whose bytes are known from the allocator: run as a program, it prints both as JSON.

A process of its own, because a session of torch's profiler would destroy one that is open.
"""

import gc
import json
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tenure.profiler import saved_for_backward


class Stashing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        z = x.clone()
        ctx.stash, ctx.box, ctx.later = x.clone(), {"k": [x.clone()]}, lambda: z
        return y * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Packed:
    """What a pack hook of a user may return."""

    def __init__(self, t):
        self.half = t.half()


def cases():
    """Names, functions that build a graph, and the tensors that were there before."""
    x = torch.randn(4, 16, 64)
    leaf = torch.randn(32, 256, requires_grad=True)

    layers = (nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(2))
    gpt = nn.Sequential(*layers)
    lstm, sequence = nn.LSTM(32, 64), torch.randn(10, 4, 32)
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    images = torch.randn(4, 3, 16, 16)
    inp = torch.randn(64, 256)
    compiled = torch.compile(lambda a: (a.sin().exp() * a).sum(), backend="aot_eager")

    def hooked(pack, unpack):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return gpt(x * 1).sum()

    def on_cpu():
        with torch.autograd.graph.save_on_cpu():
            return gpt(x * 1).sum()

    def checkpointed(reentrant):
        hidden = x * 1
        hidden.requires_grad_()
        for block in gpt:
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        return hidden.sum()

    yield "gpt", lambda: gpt(x).sum()
    yield "lstm", lambda: lstm(sequence)[0].sum()
    yield "cnn", lambda: cnn(images).mean()
    yield "custom function", lambda: Stashing.apply(leaf).sum()
    yield "reentrant checkpoint", lambda: checkpointed(True)
    yield "checkpoint", lambda: checkpointed(False)
    yield "save_on_cpu", on_cpu
    yield "packed in an object", lambda: hooked(Packed, lambda packed: packed.half.float())
    yield (
        "double backward",
        lambda: torch.autograd.grad(leaf.pow(3).sum(), leaf, create_graph=True)[0].sum(),
    )
    yield "views of a leaf and of an input", lambda: (leaf[:, :64] @ inp[:, :2]).sum()
    yield "a root that is saved itself", lambda: leaf.exp()
    yield "aot_eager", lambda: compiled(leaf)
    yield "nothing saved", lambda: (leaf + 1).sum()


def held_after(build):
    """The result of a function, and the bytes the allocator says that it left allocated."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as session:
        result = build()
        gc.collect()
    events = session.profiler.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")


def measured(build):
    build()  # what a first run builds lazily is not the graph's
    gc.collect()
    root, truth = held_after(build)
    report = saved_for_backward(root)
    result = f"{root.grad_fn.name()}.result"
    saves_root = any(result in record.saved_by for record in report.records)
    return {"truth": truth - (0 if saves_root else root.nbytes), "found": report.total_bytes}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    json.dump({name: measured(build) for name, build in cases()}, sys.stdout)
