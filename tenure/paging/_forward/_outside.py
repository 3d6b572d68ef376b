"""Errors of programs that use a paged parameter on the device outside of the model's forward.

There a parameter is on the host, because optimizers, state dicts and other threads see it. torch
raises that two tensors are on two devices, and names neither.

Invariant: an error is explained only where the line that failed has such a parameter in it.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from tenure._errors import PagingError
from tenure._text import describe_tensor
from tenure._torch.patches import Patch

from .._model import HostTensor
from ._arguments import is_about_devices

_N_NOTED = 8


class Outside:
    """What a program reads of a model outside of its forward, to explain its errors.

    Args:
        hosts: the model's tensors.
        device: where the model is paged to.
    """

    def __init__(self, hosts: Collection[HostTensor], device: torch.device) -> None:
        self._hosts, self._device = hosts, device
        self._noted: deque[HostTensor] = deque(maxlen=_N_NOTED)
        self.note, self.forget = self._noted.append, self._noted.clear
        _all.add(self)
        self._end_hook = _hook.last_while(self)

    def end(self) -> None:
        """Close it, because the model is unpaged."""
        _all.discard(self)
        self._end_hook()

    def explained(self, error: BaseException | None) -> PagingError | None:
        """Return the error that explains one of torch; None if it is about no parameter of ours."""
        if error is None or not is_about_devices(error):
            return None
        host = self._used_by(error.__traceback__)
        if host is None:
            return None
        there = str(self._device)
        explained = PagingError(
            f"{host.name!r}, {describe_tensor(host.tensor)}, was used with tensors on {there} "
            "outside of the forward of its paged model, where parameters are on the host. Use a "
            f"copy there, such as weight.to({there!r}), whose gradient arrives at the parameter; "
            "or compute it in the forward, or in a method that you name: page(..., methods=)."
        )
        explained.__cause__ = error
        return explained

    def _used_by(self, traceback: TracebackType | None) -> HostTensor | None:
        known = {id(host.tensor): host for host in self._hosts}
        calls: list[TracebackType] = []
        while traceback is not None:
            calls.append(traceback)
            traceback = traceback.tb_next
        # the innermost first
        for call in reversed(calls):
            names = set(_names_at(call))
            for value in _values(call.tb_frame, names):
                if id(value) in known:
                    return known[id(value)]
            for host in reversed(self._noted):
                if host.name.rpartition(".")[2] in names:
                    return host
        return None


def _names_at(call: TracebackType) -> Iterator[str]:
    """Yield the names in the expression that a frame was at."""
    instructions = list(dis.get_instructions(call.tb_frame.f_code))
    at = next((each for each in instructions if each.offset == call.tb_lasti), None)
    if at is None or at.positions is None or at.positions.lineno is None:
        return
    last = at.positions.end_lineno or at.positions.lineno
    for each in instructions:
        line = None if each.positions is None else each.positions.lineno
        if line is not None and at.positions.lineno <= line <= last:
            # Some instructions of later Pythons have several names.
            values = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            yield from (value for value in values if isinstance(value, str))


def _values(frame: FrameType, names: Collection[str]) -> Iterator[Any]:
    """Yield the values of these names in a frame, and the items of values that are containers."""
    for name in names:
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        yield value
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


_all: weakref.WeakSet[Outside] = weakref.WeakSet()


def _explaining(before: Any) -> Any:
    # a hook that was set after ours may call it; without models it only calls the one before
    def explain(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        found = next(filter(None, (each.explained(error) for each in list(_all))), None)
        if found is None:
            before(kind, error, traceback)
        else:
            before(PagingError, found, found.__traceback__)

    return explain


_hook = Patch(sys, {"excepthook": _explaining})
