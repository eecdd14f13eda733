"""What SQL takes for what users keep: the bytes of all its tables and indexes over those of the JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from sqlalchemy import create_engine, text

from deploy.load.curves.curve import Curve, Progress
from distributed_state import AsyncStateStore
from distributed_state.programs.servers import postgres_server, redis_server

_TURNS = 3
_AT_ONCE = 50
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


async def _fill(url: str, archive: str, first: int, last: int) -> int:
    async with AsyncStateStore.open(url, archive=archive) as store:
        size = 0
        for begin in range(first, last, _AT_ONCE):
            some = range(begin, min(begin + _AT_ONCE, last))
            size += sum(await asyncio.gather(*(_converse(store, number) for number in some)))
        await store.archive()
    return size


def sizes_of(archive: str) -> dict[str, int]:
    """The bytes of each table of a PostgreSQL archive with its indexes."""
    engine = create_engine(archive)
    query = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables ORDER BY 2 DESC"
    with engine.connect() as connection:
        found = {name: int(size) for name, size in connection.execute(text(query))}
    engine.dispose()
    return found


def sql_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """All tables of PostgreSQL against the JSON of so many conversations, right after they were archived."""
    costs = []
    with redis_server() as server, postgres_server() as database:
        done = total = 0
        for size in sizes:
            progress(f"{size} conversations")
            total += asyncio.run(_fill(server.url, database.url, done, size))
            done = size
            costs.append(sum(sizes_of(database.url).values()) / total)
    return Curve("SQL bytes : the user's JSON", "", "conversations", list(sizes), costs, 2.2)
