"""Short names for positions of events, for people. Law: one lasts no longer than the events it leads to.

A position names each partition and is long. Kept in Redis it has eight letters.

Design: section 27.
"""

from __future__ import annotations

import re

from distributed_state.errors import NotFound, StateError
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import chance

_NAME = re.compile(r"@[0-9a-f]{8}")


def is_bookmark(text: str) -> bool:
    """Whether a text may be the name of a position."""
    return bool(_NAME.fullmatch(text))


async def keep(tiers: Tiers, position: str) -> str:
    """Keep a position for `events_for`; its name, or itself where Redis does not take it, or ends with us."""
    if tiers.settings.url is None:
        return position
    name = f"@{chance.token_hex(4)}"
    try:
        lasts_ms = int(tiers.settings.events_for * 1000)
        await tiers.port.command(b"SET", tiers.keys.bookmark(name), position.encode(), b"PX", lasts_ms)
    except StateError:
        return position
    return name


async def find(tiers: Tiers, name: str) -> str:
    """The position of a name. Raises NotFound."""
    found = await tiers.warm.command(b"GET", tiers.keys.bookmark(name))
    if found is None:
        raise NotFound(f"there is no position {name}: it is forgotten with the events that it led to; give an age")
    return str(found.decode())
