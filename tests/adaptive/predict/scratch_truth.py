"""What kernels really take for themselves, call by call, beside what is said of them.

By private names, because a prediction tells its peak, and not what each call was said to take.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tenure._torch.allocations import begin, end
from tenure.adaptive._predict._scratch import Inside, inside
from tenure.adaptive._predict._values import STAND_INS


@dataclass(frozen=True)
class Call:
    """One operation that ran."""

    func: object
    shapes: str
    truth_bytes: int
    out_bytes: int
    made_bytes: int
    said: Inside

    @property
    def is_low(self):
        return self.said.n_bytes < self.truth_bytes and self.said.reason is None

    @property
    def keeps_more(self):
        """Its results have more memory than those without data."""
        return self.made_bytes > self.out_bytes

    @property
    def is_loose(self):
        """More than 2 % of what is live inside, and more than a few numbers, too high."""
        excess = self.said.n_bytes - self.truth_bytes
        # oneDNN's buffers for 16 bits grow in steps
        part = 0.12 if "bfloat16" in self.shapes else 0.02
        return excess > max(64, part * (self.truth_bytes + self.out_bytes))


class Listening(TorchDispatchMode):
    """Runs each operation on real tensors, and asks about it with fake ones."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = _fake_call(func, args, kwargs)
        begin()
        try:
            result = func(*args, **kwargs)
        finally:
            changes = end()
        if asked is not None:
            fake_args, fake_kwargs, fake_result = asked
            said = inside(func, fake_args, fake_kwargs, fake_result)
            out_bytes = _made_bytes((fake_args, fake_kwargs), said.result)
            live = peak = 0
            for n_bytes in changes.cpu:
                live += n_bytes
                peak = max(peak, live)
            shapes = str([_short(each) for each in tree_leaves((args, kwargs))])
            made_bytes = _made_bytes((args, kwargs), result)
            truth_bytes = max(0, peak - out_bytes)
            self.calls.append(Call(func, shapes, truth_bytes, out_bytes, made_bytes, said))
        return result


def _fake_call(func, args, kwargs):
    try:
        with _disable_current_modes():
            mode = FakeTensorMode()
            args, kwargs = tree_map(partial(_fake, mode), (args, kwargs))
            with mode:
                return args, kwargs, STAND_INS.get(func, func)(*args, **kwargs)
    # what has no fake result is no business of a prediction: it says so by itself
    except Exception:
        return None


def _fake(mode, leaf):
    return mode.from_tensor(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf


def _made_bytes(before, result):
    known = {each.untyped_storage()._cdata for each in _strided(before)}
    made = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _strided(result)
    }
    return sum(n_bytes for key, n_bytes in made.items() if key not in known)


def _strided(tree):
    leaves = tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _short(leaf):
    if isinstance(leaf, torch.Tensor):
        strides = "" if leaf.is_contiguous() else f" by {tuple(leaf.stride())}"
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{strides}"
    return leaf


def listen(run):
    """The operations of ``run()`` and of the backward pass of what it returns if that needs one."""
    with Listening() as mode:
        result = run()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.backward(torch.ones_like(result))
    return mode.calls
