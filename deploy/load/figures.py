"""The figures of a fleet of this machine. Law: each stands beside what it is compared with, of the same run."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import redis
import sqlalchemy

from deploy.load import baseline
from deploy.load.client import headers
from deploy.load.fleet import LocalFleet
from deploy.load.knee import PRECISION, Knee
from deploy.load.measures import Result
from deploy.load.reporting import Figure
from deploy.load.scenarios import FIELDS
from deploy.load.verifying import Difference, Expected, Source, messages_of
from distributed_state import StateError, StateStore
from distributed_state.programs.replay.run import gaps, same

LISTED = 100_000
_KNEE = 0.95  # of the bare workers' turns a second
_FILL = """
insert into records (namespace, record, partition, scope, epoch, version, created_ms, updated_ms, listed_ms, deleted)
select :namespace, 'session:listed-' || n, n % 64, 'session', '1-abcdef12', 1, :now + n, :now + n, :now + n, false
from generate_series(1, :count) n
"""


def compared(fleet: LocalFleet, source: Source, commands: baseline.Commands) -> Figure:
    """Turns a second of the library alone, beside bare redis-py."""
    count = len(fleet.workers)
    paces = baseline.compared(fleet.warm.url, count, _messages(source), commands)
    found = {name: pace.turns for name, pace in paces.items()}
    library = found.pop("library")
    name = max(found, key=lambda each: found[each])
    beside = f"{found[name]:,.0f}/s: {count} processes of {name}, the same {commands.count} commands"
    return share(f"turns/s of the library, {count} processes, no HTTP, no archiving", library, found[name], beside)


def commands(fleet: LocalFleet, source: Source) -> baseline.Commands:
    """What the library asks of Redis."""
    return baseline.commands(fleet.warm.url, _messages(source))


def _messages(source: Source) -> list[dict[str, Any]]:
    return source[0][min(1, len(source[0]) - 1)]


def share(name: str, measured: float, whole: float, beside: str, goal: float = 0.6) -> Figure:
    """What part of a bare alternative's turns a second ours are."""
    return Figure(
        name, f"{measured:,.0f}/s, {measured / whole:.0%}", beside, f">= {goal:.0%}", measured >= goal * whole
    )


def at_knees(ours: Knee, bare: Knee, workers: int, commands: baseline.Commands) -> list[Figure]:
    """Both knees over HTTP."""
    name = f"turns/s at the knee over HTTP, {workers} workers, archiving"
    theirs = f"{workers} workers of Starlette and redis-py alone, the same server, token and {commands.count} commands"
    mine, other = ours.best, bare.best
    if mine is None or other is None or not (ours.found and bare.found):
        said = f"not found to {PRECISION - 1:.0%}: {_bounds(ours)}; {_bounds(bare)} of bare workers"
        return [Figure(name, said, theirs, f">= {_KNEE:.0%}", reached=False)]
    beside = f"{other.per_second:,.0f}/s: {theirs}"
    return [
        share(name, mine.per_second, other.per_second, beside, _KNEE),
        Figure("p50 / p99 there", _latency(mine), f"{_latency(other)} at theirs"),
    ]


def at_half(mine: Result, theirs: Result) -> Figure:
    """What a turn takes with half the knee's load on the workers."""
    name = f"p50 / p99 at half the knee, {mine.rate:,.0f}/s"
    return Figure(name, _latency(mine), f"{_latency(theirs)} of bare workers", "<= 25 ms", mine.p99 <= 0.025)


def _bounds(knee: Knee) -> str:
    return f"{knee.best.per_second:,.0f}/s carried" if knee.best else "no rate carried"


def _latency(result: Result) -> str:
    return f"{result.p50 * 1000:.1f} / {result.p99 * 1000:.1f} ms"


def cpu(before: dict[str, float], after: dict[str, float], result: Result) -> Figure:
    """What one turn costs each part, in milliseconds of CPU."""
    each = {name: (after[name] - before[name]) * 1000 / max(result.answered, 1) for name in before}
    told = ", ".join(f"{name} {taken:.2f}" for name, taken in each.items())
    return Figure(f"ms of CPU for a turn, at {result.per_second:,.0f}/s", told, f"{sum(each.values()):.2f} in all")


def settle(fleet: LocalFleet) -> None:
    """Wait until everything is archived: what a search for the knee left to do is no part of what is measured next."""
    with _store(fleet) as store:
        store.admin.archive()


def _store(fleet: LocalFleet) -> StateStore:
    return StateStore.open(
        fleet.warm.url, archive=fleet.postgres.url, namespace=fleet.namespace, archiver=False, beat=0.0
    )


def idle_bytes(fleet: LocalFleet, sessions: int = 3000) -> Figure:
    """What an idle session of 2 KB takes in Redis."""
    client = redis.Redis.from_url(fleet.warm.url)
    with client, _store(fleet) as store:
        store.admin.archive()
        before = client.info("memory")["used_memory_dataset"]
        for number in range(sessions):
            store.session(f"idle-{time.time_ns()}-{number}").create(FIELDS)
        store.admin.archive()
        after = client.info("memory")["used_memory_dataset"]
    size = len(json.dumps(FIELDS))
    each = (after - before) / sessions
    measured = f"{each:,.0f} bytes, {each / size:.2f}x"
    return Figure("Redis memory of an idle session", measured, f"{size:,} bytes of JSON", "<= 1.6x", each <= 1.6 * size)


def pages(fleet: LocalFleet, rounds: int = 30) -> list[Figure]:
    """A page of 50 of 100,000 sessions, over HTTP, first, middle and last."""
    engine = sqlalchemy.create_engine(fleet.postgres.url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        given = {"namespace": fleet.namespace, "now": round(time.time() * 1000), "count": LISTED}
        connection.execute(sqlalchemy.text(_FILL), given)
        connection.execute(sqlalchemy.text("vacuum analyze records"))
    engine.dispose()
    place = urlsplit(fleet.urls[0])
    http = HTTPConnection(place.hostname or "", place.port, timeout=30)

    def page(limit: int, after: str | None) -> Any:
        asked = urlencode({"limit": limit} | ({"after": after} if after else {}))
        http.request("GET", f"/v1/conversations?{asked}", headers=headers())
        return json.loads(http.getresponse().read())

    rows = []
    after = None
    depth = 0
    for goal in (0, LISTED // 2, LISTED - 1000):
        while depth < goal:
            after = page(1000, after)["after"]
            depth = depth + 1000
        page(50, after)
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            found = page(50, after)
            taken.append((time.perf_counter() - began) * 1000)
            assert len(found["conversations"]) == 50
        half = statistics.median(taken)
        most = max(taken)
        rows.append(Figure(f"a page of 50 of {LISTED:,} sessions, from {depth:,}", f"{half:.1f} ms, at most {most:.1f}",
                           "over HTTP", "<= 10 ms", half <= 10))  # fmt: skip
    http.close()
    return rows


def archived(
    fleet: LocalFleet, source: Source, expected: list[Expected], most: int = 2000
) -> tuple[int, list[Difference]]:
    """Read the histories from SQL alone: how many, and what is wrong with them."""
    some = expected[:: max(len(expected) // most, 1)]
    found: list[Difference] = []
    stopped: Counter[str] = Counter()
    with StateStore.open(
        fleet.warm.url, archive=fleet.postgres.url, namespace=fleet.namespace, archiver=False
    ) as store:
        try:
            store.admin.archive()
        except StateError as error:
            stopped[str(error)] = 0
        for each in some:
            try:
                history = store.session(each.id).history() if each.acks else []
            except StateError as error:
                stopped[str(error)] += 1
                continue
            found += [Difference(f"{each.id}: in SQL {text}") for text in gaps(change.version for change in history)]
            kept = {change.version: [message.to_dict() for message in change.appended] for change in history}
            for version, turn in each.acks:
                if not same(kept.get(version), messages_of(source, turn)):
                    said = f"{each.id}: turn {turn}, acknowledged as version {version}, is not in SQL"
                    found.append(Difference(said, lost=True))
    # A journal that lost what SQL has stops its partition there.
    found += [Difference(f"{count} histories cannot be read: {why}", lost=True) for why, count in stopped.items()]
    return len(some), found
