"""Gradients are delivered all or not at all, and with them all else that a step changes."""

import contextlib
import dis
import functools
import itertools
import sys

import pytest
import torch
from torch import nn

from tenure.adaptive import step
from tenure.adaptive._attempt import _attempts
from tenure.adaptive._step._gradients import _isolated
from tenure.adaptive._step._split import _parts
from tenure.adaptive._undo import _rollback

_TRACED = {module.__file__ for module in (_attempts, _rollback, _isolated, _parts)}


@functools.cache
def checked_in(code):
    """The instructions before which Python looks whether it was interrupted."""
    instructions = list(dis.get_instructions(code))
    checks = ("CALL", "RESUME", "JUMP_BACKWARD")
    return {
        after.offset
        for before, after in itertools.pairwise(instructions)
        if before.opname.startswith(checks)
    }


class Interrupted:
    """A block that is interrupted at the n-th chance from the beginning of the delivery on.

    Attributes:
        is_over: whether there were fewer.
    """

    def __init__(self, n):
        self.n_left = n
        self.is_over = True
        self._has_begun = False

    def __enter__(self):
        self._before = sys.gettrace()
        # Python 3.12 tells of opcodes if a frame asked for them before the trace began
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _on_call(self, frame, event, arg):
        if frame.f_code.co_filename not in _TRACED:
            return None
        if frame.f_code is _isolated.IsolatedGradients.finish.__code__ and not self._has_begun:
            self._has_begun = True
            caller = frame.f_back
            while caller is not None:  # those that are on their way go on after the delivery
                if caller.f_code.co_filename in _TRACED:
                    caller.f_trace, caller.f_trace_opcodes = self._on_event, True
                caller = caller.f_back
        frame.f_trace_opcodes = True
        return self._on_event

    def _on_event(self, frame, event, arg):
        is_chance = event == "opcode" and frame.f_lasti in checked_in(frame.f_code)
        if self._has_begun and is_chance:
            self.n_left -= 1
            if self.n_left < 0 and self.is_over:
                self.is_over = False
                sys.settrace(None)
                raise KeyboardInterrupt
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "sparse", "expanded"])
def test_an_interrupt_finds_all_gradients_delivered_or_none(kind):
    torch.manual_seed(0)
    first = nn.Embedding(5, 4, sparse=kind == "sparse")
    net = nn.Sequential(first, nn.BatchNorm1d(4), Counter(), nn.Linear(4, 3), nn.Dropout())
    x = torch.randint(5, (6,))
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def begin():
        torch.manual_seed(1)
        net.load_state_dict(start)
        net[2].n_calls = 0
        net.zero_grad()
        net[0](x).sum().backward()
        if kind == "expanded":
            net[3].bias.grad = torch.ones(()).expand(3)
        else:
            net[3].bias.grad = torch.ones(3)
        return state_of(net)

    def run():
        step(lambda b: net(b).square().mean(), x, batchnorm="per_chunk", maximum=3)

    begin()
    run()
    after, n = state_of(net), 0
    outcomes = set()
    while True:
        before = begin()
        with Interrupted(n) as block, contextlib.suppress(KeyboardInterrupt):
            run()
        now = state_of(net)
        assert torch.is_grad_enabled()
        assert same(now, before) or same(now, after), n
        outcomes.add(same(now, after))
        if block.is_over:
            break
        n += 1
    assert n > 40
    assert outcomes == {True, False}
