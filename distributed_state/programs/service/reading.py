"""Reading a conversation for an answer. Law: what is too large to answer is refused before it is in memory.

Design: section 24.
"""

from __future__ import annotations

from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.programs.service.limits import Limits
from distributed_state.records import messages
from distributed_state.records.context import RecordContext
from distributed_state.records.messages import Page, Shown


async def shown(context: RecordContext, page: Page, limits: Limits, *, fresh: bool) -> tuple[Shown, int]:
    """Fields, phase and messages of one version, as one look at the record gives them, and their size in bytes.

    Raises InvalidValue, which says how to ask for less, if they are larger than an answer may be.
    """
    most = limits.answer
    try:
        found = await messages.chosen(context.tiers, context.keys, page, fresh=fresh, most=most)
    except TooLarge as error:
        raise InvalidValue(f"{error}: ask for fewer of them, page by page") from error
    size = sum(map(len, found.entry.fields.values())) + sum(map(len, found.stored.values()))
    if size > most:
        raise InvalidValue(f"fields and messages are {size} bytes, more than {most}: ask for fewer messages at once")
    return found, size
