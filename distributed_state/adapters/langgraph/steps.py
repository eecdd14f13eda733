"""What the adapter does, written once for both faces. Law: a step is `yield`ed, and nothing else waits.

LangGraph calls a saver's blocking methods and its asyncio ones, on one object, the first also from coroutines of a
running loop. A procedure is a generator: each call of the store is yielded, as `fields = yield record.get_all()`. With
handles of the blocking face what is yielded is the result already; with those of the asyncio face it is awaited. Of a
list, side by side: those leave in one exchange.

Design: section 22.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

Steps = Generator[Any, Any, T]


def sent(batch: Any) -> Any:
    """Send a batch of either face: a step."""
    leave = batch.__exit__ if hasattr(batch, "__exit__") else batch.__aexit__
    return leave(None, None, None)


def run(steps: Steps[T]) -> T:
    """Carry a procedure out on handles of the blocking face."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(steps: Steps[T]) -> T:
    """Carry a procedure out on handles of the asyncio face."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await (asyncio.gather(*step) if isinstance(step, list) else step)
            except BaseException as error:  # noqa: BLE001 - it is raised at the step, a cancellation too
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
