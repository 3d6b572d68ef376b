"""A function with something around each of its calls, that stays the kind of function it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Any


def around(func: Any, call: Callable[[], AbstractContextManager[None]]) -> Any:
    """``func``, with each call, up to the end of what it returns, in a block of ``call``."""

    async def stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with call():
            inner = func(*args, **kwargs)
            step, items = inner.asend(None), list[Any]()
            try:
                while True:
                    items.append(await step)
                    del step  # with what was sent: nothing is to live longer than without us
                    try:
                        step = inner.asend((yield items.pop()))
                    except GeneratorExit:
                        await inner.aclose()
                        raise
                    except BaseException as error:
                        step = inner.athrow(error)
            except StopAsyncIteration:
                return

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with call():
            return await func(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        with call():
            return (yield from func(*args, **kwargs))

    def plain(*args: Any, **kwargs: Any) -> Any:
        with call():
            return func(*args, **kwargs)

    if inspect.isasyncgenfunction(func):
        return functools.wraps(func)(stream)
    if inspect.iscoroutinefunction(func):
        return functools.wraps(func)(coroutine)
    return functools.wraps(func)(generator if inspect.isgeneratorfunction(func) else plain)
