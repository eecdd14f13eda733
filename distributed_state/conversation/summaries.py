"""Summaries of what does not fit into a window. Law: made once, under the session's lock, and stored at once.

A summary stands for messages that it names by their numbers; it holds for exactly those that it was made from.

Design: section 11.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from distributed_state.conversation.fit_window import turns
from distributed_state.conversation.tokens import counted
from distributed_state.conversation.window import Bounds, Summary, Window
from distributed_state.conversation.window_reading import PAGE, Fitted, StoredConversation, fit
from distributed_state.errors import Conflict, InvalidValue, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import SEGMENTS, START, SUMMARY, Message

Look = Callable[[], Awaitable[CachedRecord]]
Keep = Callable[[CachedRecord, bytes], Awaitable[Any]]


async def of_session(context: RecordContext, bounds: Bounds) -> Window:
    """The window of a stored conversation. A summary that has to be made is made under the session's lock."""
    tiers = context.tiers
    names = context.keys
    fresh = False

    async def fitted() -> Fitted:
        nonlocal fresh
        entry = await read_path.read(tiers, names, fresh=fresh)
        fresh = True
        return await fit(tiers, names, entry, bounds)

    first = await write_path.until_no_conflict(tiers, fitted)
    if first.target == first.floor:
        return first.window

    async def keep(seen: CachedRecord, data: bytes) -> None:
        change = context.changes()
        change.put(SUMMARY, data)
        draft = change.draft("summary")
        # Of the very messages that it was made from, and not over somebody else's.
        draft.epoch = seen.epoch
        draft.expectations += [(name, seen.fields.get(name)) for name in (SUMMARY, SEGMENTS, START)]
        await context.commit(draft)

    async with _alone(context, bounds.wait):
        return await summarized(
            tiers, names, bounds, look=lambda: read_path.read(tiers, names, fresh=True), keep=keep
        )  # fmt: skip


def _alone(context: RecordContext, wait: float) -> AbstractAsyncContextManager[Any]:
    """The session's lock, unless this task holds it. Others may write meanwhile: a summarizer takes its time."""
    tiers = context.tiers
    held = tiers.leases.of(context.text)
    if held is not None and held.owner is tiers.port.owner():
        return nullcontext()
    return tiers.lock(context.keys, wait=wait, ttl=30.0, advisory=True)


async def summarized(
    tiers: Tiers, names: RecordKeys, bounds: Bounds, *, look: Look, keep: Keep, pending: Sequence[Message] = ()
) -> Window:
    """Summarize until the window fits. For the holder of the session's lock.

    `look` reads the record as it is now, `#summary` included; `keep(entry, data)` stores a new `#summary` for the entry
    that it was made from, or raises Conflict. `pending` messages follow the stored ones and are always kept.
    """
    for _ in range(tiers.settings.conflict_retries):
        fitted = await fit(tiers, names, await look(), bounds, pending)
        if fitted.target == fitted.floor:
            return fitted.window
        await _summarize(fitted, bounds, names.ref.text[:200], keep)
    raise Conflict(f"{names.ref.text[:200]}: its messages change faster than they can be summarized")


async def _summarize(fitted: Fitted, bounds: Bounds, record: str, keep: Keep) -> None:
    """Summarize what is too much, in pieces of at most `max_tokens`, each stored when it is made.

    Ends early if the conversation was cleared or rolled back meanwhile.
    """
    it = fitted.conversation
    entry = fitted.conversation.entry
    summary = fitted.window.summary
    place = fitted.floor
    while place < fitted.target:
        messages, stop = await _piece(it, place, fitted.target, bounds.max_tokens)
        first = it.number(place)
        last = it.number(stop - 1)
        text = await _ask(bounds, messages, summary.text if summary else None, f"{record}: messages {first} to {last}")
        summary = Summary(text, summary.start if summary else it.number(0), last + 1)
        data = summary.pack(entry.codec)
        try:
            await keep(entry, data)
        except Conflict:
            return
        entry = entry.with_field(SUMMARY, data)
        place = stop


async def _piece(it: StoredConversation, start: int, stop: int, most: int) -> tuple[list[Message], int]:
    """Whole turns from a place on that together count at most so much, at least one; and the place after them."""
    messages: list[Message] = []
    counts: list[int] = []
    end = start
    while end < stop:
        page = await it.read((end, min(end + PAGE, stop)))
        end += len(page)
        messages += [message for message, _ in page]
        counts += [count for _, count in page]
        if sum(counts) > most:
            starts = [place for place in turns(messages) if place > 0]
            size = max((place for place in starts if sum(counts[:place]) <= most), default=min(starts, default=0))
            if size:
                return messages[:size], start + size
    return messages, stop


async def _ask(bounds: Bounds, messages: list[Message], previous: str | None, what: str) -> str:
    assert bounds.summarizer is not None
    try:
        made = bounds.summarizer(messages, previous)
        text = await made if inspect.isawaitable(made) else made
    except Exception as error:
        error.add_note(f"{what} were being summarized; they are all still there, and no summary of them was stored")
        raise
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue(f"{what}: the summarizer returned {text!r:.80}, not a text; nothing was stored")
    size = counted(bounds.counter, Summary(text, 0, 0).message())
    if size > bounds.max_tokens:
        raise TooLarge(f"{what}: the summary of {size} tokens is more than max_tokens={bounds.max_tokens}; not stored")
    return text
