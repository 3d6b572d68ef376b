"""Seeing which modules run on this thread: a look into ``nn.Module.__call__``.

torch has hooks for all modules, but compiled code guards on them: what was compiled without is
compiled once more where there are some, and ``torch.compile(module)`` warns. So the call itself is
wrapped, as torch.fx does while it traces; once and for good, because each change of a class makes
Python forget what it has learned about the attributes of all modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Seen = Callable[[nn.Module], object]
_is_compiled = torch.compiler.is_dynamo_compiling


class _Thread(threading.local):
    seen: Seen | None = None


_this_thread = _Thread()
_lock = threading.Lock()


@contextmanager
def modules_told(seen: Seen) -> Iterator[None]:
    """A block in which ``seen`` gets each module that is called on this thread, before it runs.

    Those that run inside compiled code are not told, and where blocks nest, each is.
    """
    with _lock:  # two threads that are the first here wrap once
        _wrap_calls()
    outer = _this_thread.seen
    _this_thread.seen = seen if outer is None else _both(seen, outer)
    try:
        yield
    finally:
        _this_thread.seen = outer


def works() -> bool:
    """Whether a module that is called is told."""
    ran: list[nn.Module] = []
    module = nn.Identity()
    with modules_told(ran.append):
        module(None)
    return ran == [module]


def _both(inner: Seen, outer: Seen) -> Seen:
    def seen(module: nn.Module) -> None:
        inner(module)
        outer(module)

    return seen


@functools.cache
def _wrap_calls() -> None:
    call: Any = nn.Module.__call__

    @functools.wraps(call)
    def told_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # dynamo folds the first condition, and sees a plain call
        if not _is_compiled():
            seen = _this_thread.seen
            if seen is not None:
                seen(self)
        return call(self, *args, **kwargs)

    nn.Module.__call__ = told_call  # type: ignore[method-assign]  # as torch.fx does
