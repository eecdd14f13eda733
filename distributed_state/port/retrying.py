"""Retries a change while other writers are faster. Law: each attempt begins with the present state.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from distributed_state.errors import Conflict

T = TypeVar("T")


async def until_no_conflict(
    once: Callable[[], Awaitable[T]],
    attempts: int,
    sleep: Callable[[float], Awaitable[Any]],
    *,
    passing: Callable[[Conflict], bool] = lambda _: True,
) -> T:
    """Return the first result of `once`; after a `passing` Conflict wait, longer each time, with jitter, and retry."""
    try:
        return await once()
    except Conflict as conflict:
        if not passing(conflict):
            raise
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Conflict) and passing(error)),
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=0.001, max=0.1),
            sleep=sleep,
            reraise=True,
        )
        return await retrying(once)
