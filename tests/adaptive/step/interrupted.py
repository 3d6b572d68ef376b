"""Steps that get Ctrl-C as gradients are delivered: a program, as a block may stay open."""

import contextlib
import itertools
import signal
import sys

import torch
from torch import nn

import tenure
from tenure import current_scope
from tenure.adaptive import step

# where gradients are delivered: a block elsewhere may stay open, as any that Ctrl-C ends
_FILES = ("_attempt/_attempts.py", "_undo/_rollback.py", "_step/_gradients.py", "_step/_parts.py")
_OURS = {f"{tenure.__path__[0]}/adaptive/{name}" for name in _FILES}


class Interrupted:
    """A block that gets Ctrl-C at the n-th line of these files from `begin` on.

    Attributes:
        has_begun: whether lines count.
        is_over: whether there were fewer.
    """

    def __init__(self, n):
        self.n_left, self.has_begun, self.is_over = n, False, True

    def begin(self, gradient):
        self.has_begun = True

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._on_event)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _on_event(self, frame, event, arg):
        if frame.f_code.co_filename not in _OURS:
            return None
        if event == "line" and self.has_begun:
            self.n_left -= 1
            if self.n_left < 0 and self.is_over:
                self.is_over = False
                signal.raise_signal(signal.SIGINT)
        return self._on_event


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return x


def state_of(net):
    values = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
    values += [*net.buffers(), torch.tensor(net[2].n_calls)]
    return [value.clone() for value in values] + [torch.get_rng_state()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def main(kind):
    torch.manual_seed(0)
    first = nn.Embedding(5, 4, sparse=kind != "dense")
    net = nn.Sequential(first, nn.BatchNorm1d(4), Counter(), nn.Linear(4, 3), nn.Dropout())
    x = torch.randint(5, (6,))
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def run(n):
        torch.manual_seed(1)
        net.load_state_dict(start)
        net[2].n_calls = 0
        net.zero_grad()
        net[0](x).sum().backward()
        net[3].bias.grad = torch.ones(3) if kind == "dense" else torch.ones(()).expand(3)
        before = state_of(net)
        with Interrupted(n) as block, contextlib.suppress(KeyboardInterrupt):
            # hooks run when all gradients are there, right before they are delivered
            handle = net[3].weight.register_hook(block.begin)
            step(
                lambda b: net(b).square().mean(), x, batchnorm="per_chunk", maximum=3, verify=False
            )
        handle.remove()
        # as Ctrl-C may leave any block: the next scope would close it
        if (left := current_scope()) is not None:
            left.close()
        return before, state_of(net), block.is_over

    _, after, _ = run(1_000_000)
    outcomes = set()
    for n in itertools.count(step=3):
        before, now, is_over = run(n)
        assert torch.is_grad_enabled()
        assert same(now, before) or same(now, after), n
        outcomes.add(same(now, after))
        if is_over:
            break
    assert n > 40
    assert outcomes == {True, False}


if __name__ == "__main__":
    for kind in ("dense", "sparse and expanded"):
        main(kind)
