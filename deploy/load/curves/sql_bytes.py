"""What SQL takes for what users keep: the bytes of all its tables and indexes over those of the JSON.

Right after it was archived, and after `compact` and VACUUM FULL; plain and encrypted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence

from sqlalchemy import create_engine, text

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore, Encryption, KeyRing
from distributed_state.programs.servers import postgres_server, redis_server

_TURNS = 3
_AT_ONCE = 50
_WINDOW = 2.0
# As long as those of the airline agents of tau-bench (Sierra, 2024) are on the average: 131, 251, 844 and 332 bytes.
_QUESTION = "I would like to change my flight to Denver to the following day, {key}."
_CALL = '{{"origin": "BOS", "destination": "DEN", "date": "2024-05-{day:02}", "booking": "{key}", "cabin": "economy"}}'
_FLIGHT = '{{"flight_number": "HAT{number:03}", "departs": "07:{day:02}", "seats": {number}, "price": {number}}}'
_ANSWER = (
    "There are three flights that day: at 07:15, 11:40 and 18:05. The one at 11:40 costs 38 dollars more, one stop in "
    "Chicago; the others are direct. Shall I change your booking {key} to one of them? Your seat stays as it is."
)


def _commits(number: int) -> list[tuple[dict[str, object], dict[str, object]]]:
    """What a conversation commits: fields and a message each time. The texts differ, as those of people do."""
    commits: list[tuple[dict[str, object], dict[str, object]]] = []
    for turn in range(_TURNS):
        key, day = f"{number * 7919 + turn * 104729:x}", number % 28 + 1
        flights = ", ".join(_FLIGHT.format(number=(number * each) % 997, day=day) for each in range(1, 10))
        call = {"name": "search_flights", "arguments": _CALL.format(key=key, day=day)}
        asked = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": key, "type": "function", "function": call}],
        }
        commits.append(({"step": turn}, {"role": "user", "content": _QUESTION.format(key=key)}))
        commits.append(({}, asked))
        commits.append(({}, {"role": "tool", "tool_call_id": key, "name": "search_flights", "content": flights}))
        fields: dict[str, object] = {"booking": {"id": key, "from": "BOS", "to": "DEN", "seats": [turn]}}
        commits.append((fields, {"role": "assistant", "content": _ANSWER.format(key=key)}))
    return commits


async def _converse(store: AsyncStateStore, number: int) -> int:
    """Keep a conversation; the bytes of its JSON."""
    session = store.session(f"conversation-{number}", user=f"user-{number % 97}")
    size = 0
    for fields, message in _commits(number):
        await session.write(set=fields, append=[message])
        size += sum(len(json.dumps(each)) for each in (*fields.values(), message))
    return size


async def _fill(store: AsyncStateStore, first: int, last: int) -> int:
    size = 0
    for begin in range(first, last, _AT_ONCE):
        some = range(begin, min(begin + _AT_ONCE, last))
        size += sum(await asyncio.gather(*(_converse(store, number) for number in some)))
    await store.admin.archive()
    return size


async def _compact(store: AsyncStateStore) -> None:
    await asyncio.sleep(_WINDOW)  # what is younger is not packed
    await store.admin.compact(older_than=_WINDOW)


async def _measured(
    url: str, archive: str, sizes: Sequence[int], progress: Progress, *, packed: bool, encrypted: bool
) -> list[float]:
    costs = []
    done = total = 0
    encryption = Encryption(KeyRing({"key": secrets.token_bytes(32)})) if encrypted else None
    options = {"op_window": _WINDOW, "retry_for": 0.5, "timeout": 0.5}
    async with AsyncStateStore.open(url, archive=archive, encryption=encryption, **options) as store:
        for size in sizes:
            progress(f"{size} conversations")
            total += await _fill(store, done, size)
            done = size
            if packed:
                await _compact(store)
                await asyncio.to_thread(_vacuum, archive)
            costs.append(sum(sizes_of(archive).values()) / total)
    return costs


def _vacuum(archive: str) -> None:
    engine = create_engine(archive, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("VACUUM FULL"))
    engine.dispose()


def sizes_of(archive: str) -> dict[str, int]:
    """The bytes of each table of a PostgreSQL archive with its indexes."""
    engine = create_engine(archive)
    query = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables ORDER BY 2 DESC"
    with engine.connect() as connection:
        found = {name: int(size) for name, size in connection.execute(text(query))}
    engine.dispose()
    return found


def _curve(sizes: Sequence[int], progress: Progress, name: str, goal: float, *, packed: bool, encrypted: bool) -> Curve:
    with redis_server() as server, postgres_server() as database:
        measured = _measured(server.url, database.url, sizes, progress, packed=packed, encrypted=encrypted)
        return Curve(
            f"SQL bytes : the user's JSON, {name}", "", "conversations", list(sizes), asyncio.run(measured), goal
        )


def sql_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """All tables of PostgreSQL against the JSON of so many conversations, right after they were archived."""
    return _curve(sizes, progress, "fresh", 2.2, packed=False, encrypted=False)


def packed_sql_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """The same after compaction."""
    return _curve(sizes, progress, "compacted", 0.9, packed=True, encrypted=False)


def encrypted_sql_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """With every value encrypted."""
    return _curve(sizes, progress, "encrypted, fresh", 2.6, packed=False, encrypted=True)


def packed_encrypted_sql_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """With every value encrypted, after compaction."""
    return _curve(sizes, progress, "encrypted, compacted", 1.8, packed=True, encrypted=True)
