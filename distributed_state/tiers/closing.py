"""Ends what was begun. Law: every step is tried, whatever befell the one before.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from distributed_state.errors import StateError

log = logging.getLogger(__name__)
Step = Callable[[], Awaitable[None] | None]


async def try_each(steps: Iterable[Step]) -> None:
    """Take each step; what ends more than a step, as a cancellation does, is raised after the last one."""
    failed: BaseException | None = None
    for step in steps:
        try:
            waits = step()
            if waits is not None:
                await waits
        except StateError as error:
            log.warning("close: %s", error)
        except BaseException as error:  # noqa: BLE001 - what is not ended would go on for good
            failed = failed or error
    if failed is not None:
        raise failed
