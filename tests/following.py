"""Followers of turns, for tests. Law: a follower is shown each attempt's chunks in order and once, or a mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distributed_state.results import Chunk, Ended, Restarted, StopRequested, Truncated


async def shown(session: Any, request: str | None = None, *, after: str | None = None, wait: float = 5) -> list[Any]:
    """All parts that a follower is shown."""
    return [part async for part in session.output(request, after=after, wait=wait)]


def plain(parts: Sequence[Any]) -> list[Any]:
    """The data of chunks, and of other parts their class and what they say."""
    said: list[Any] = []
    for part in parts:
        if isinstance(part, Chunk):
            said.append(part.data)
        elif isinstance(part, Ended):
            said.append(("Ended", part.version, part.outcome))
        elif isinstance(part, StopRequested):
            said.append(("StopRequested", part.reason))
        else:
            said.append(type(part).__name__)
    return said


async def streamed(session: Any, request: str | None, *chunks: Any, outcome: Any = None) -> None:
    """A whole turn."""
    async with session.turn(request_id=request) as turn:
        for chunk in chunks:
            await turn.stream(chunk)
        turn["done"] = request
        turn.outcome = outcome


def chunk_of(attempt: object, number: int) -> str:
    """The chunk of this number, from 1, that an attempt streams, for `attempts`."""
    return f"{attempt}:{number}"


def attempts(parts: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """Each attempt that was shown, and the numbers of its chunks. Fails where the law is broken.

    Chunks are those of `chunk_of`: consecutive from 1, but where Truncated says that some are missing; those of
    another attempt come only after Restarted.
    """
    found: list[tuple[str, list[int]]] = []
    truncated = False
    for part in parts:
        if isinstance(part, Restarted):
            found.append(("", []))
            truncated = False
        elif isinstance(part, Truncated):
            truncated = True
        elif isinstance(part, Chunk):
            matched = re.fullmatch(r"(\w+):(\d+)", part.data)
            assert matched is not None, part
            attempt, number = matched[1], int(matched[2])
            if not found:
                found.append(("", []))
            known, numbers = found[-1]
            if not known:
                found[-1] = (attempt, numbers)
            assert known in ("", attempt), f"chunks of two attempts are mixed: {plain(parts)}"
            last = numbers[-1] if numbers else 0
            assert number > last if truncated else number == last + 1, f"not in order and once: {plain(parts)}"
            numbers.append(number)
            truncated = False
    return found
