"""Prometheus metrics of a store (extra `telemetry`). Law: a scrape asks no server; it shows what the store knows.

Figures of partitions are reported by the replica that archives them, so the sum over all replicas is the fleet's.

Design: sections 9, 27.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distributed_state.errors import ConfigurationError
from distributed_state.search.querying import follower_of
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import StateStore
from distributed_state.store.lifecycle import core_of, lifecycle_of
from distributed_state.store.reaper import Reaper
from distributed_state.store.watch import JournalWatch, Seen, SqlSeen, SqlWatch
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.heartbeat import release
from distributed_state.warm.telemetry import Times

Labelled = dict[tuple[str, ...], float]
_SHOWN = 200  # characters of a label
_SQL_KNOWN = 60.0  # seconds for which the last figures of SQL's connections are shown


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric. `read` returns its value for a store, or its values by label values."""

    name: str
    kind: str
    help: str
    read: Callable[[Tiers], float | Labelled | None]
    labels: tuple[str, ...] = ()


def _reapers(tiers: Tiers) -> list[Reaper]:
    return [each for each in tiers.workers if isinstance(each, Reaper)]


def _indexed(tiers: Tiers) -> int:
    return follower_of(tiers).indexed


def _handled(tiers: Tiers, name: str) -> int:
    return tiers.consumers.past[name] + sum(int(getattr(each, name)) for each in list(tiers.handlings))


def _watch(tiers: Tiers) -> JournalWatch | None:
    return next((each for each in tiers.workers if isinstance(each, JournalWatch)), None)


def _seen(tiers: Tiers) -> tuple[Seen, float] | None:
    """The last look at the journals that this replica archives, and its age in seconds."""
    watch = _watch(tiers)
    return None if watch is None or watch.seen is None or watch.age is None else (watch.seen, watch.age)


def _journals(tiers: Tiers) -> dict[int, tuple[int, int]]:
    """Unarchived entries and bytes."""
    found = _seen(tiers)
    places = {} if found is None else found[0].journals.places
    return {each: (max(0, at.offset - at.archived), max(0, at.waiting)) for each, at in places.items()}


def _fill(tiers: Tiers) -> float | None:
    found = _seen(tiers)
    if found is None:
        return None
    return max((place.fill(tiers.settings) for place in found[0].journals.places.values()), default=0.0)


def _lags(tiers: Tiers) -> dict[int, float]:
    """The age of each partition's oldest unarchived commit; it keeps growing while Redis is unavailable."""
    found = _seen(tiers)
    if found is None:
        return {}
    journals, age = found[0].journals, found[1]
    return {each: journals.ages[each] + age if each in journals.ages else 0.0 for each in journals.places}


def _lag(tiers: Tiers) -> float | None:
    return max(_lags(tiers).values(), default=None if _seen(tiers) is None else 0.0)


def _seconds_left(tiers: Tiers) -> dict[int, float]:
    found = _seen(tiers)
    return {} if found is None else found[0].seconds_left


def _of_redis(share: Callable[[Seen], float | None]) -> Callable[[Tiers], float | None]:
    def read(tiers: Tiers) -> float | None:
        found = _seen(tiers)
        return None if found is None else share(found[0])

    return read


def _sql_watch(tiers: Tiers) -> SqlWatch | None:
    return next((each for each in tiers.workers if isinstance(each, SqlWatch)), None)


def _of_sql(value: Callable[[SqlSeen], float | None]) -> Callable[[Tiers], float | None]:
    """None if the last look is too old: its figures may no longer be true."""

    def read(tiers: Tiers) -> float | None:
        watch = _sql_watch(tiers)
        known = watch is not None and watch.age is not None and watch.age <= _SQL_KNOWN
        return value(watch.seen) if known and watch is not None and watch.seen is not None else None

    return read


def _sql_age(tiers: Tiers) -> float | None:
    watch = _sql_watch(tiers)
    return None if watch is None else watch.age


def _diverged(tiers: Tiers) -> dict[int, str]:
    """Why partitions of this replica cannot be archived; the others are reported by their present archivers."""
    diverged, mine = tiers.archiver.diverged.copy(), set(tiers.archiver.mine)
    return {each: why for each, why in diverged.items() if each in mine}


def _newest_quarantined(tiers: Tiers) -> Labelled:
    newest = tiers.archiver.newest_quarantined
    return {(newest[0][:_SHOWN], newest[2][:_SHOWN]): float(newest[1])} if newest else {}


def _by_partition(values: dict[int, float]) -> Labelled:
    return {(str(each),): value for each, value in sorted(values.items())}


def _link_up(tiers: Tiers) -> float | None:
    return None if tiers.link.silence is None else float(tiers.link.up)


FIGURES = (
    Figure(
        "build_info", "gauge", "Always 1; the labels give the release and the version of Python",
        lambda _: {(release(), platform.python_version()): 1.0}, ("version", "python"),
    ),
    Figure("hot_hits", "counter", "Reads answered from the in-process cache", lambda t: t.hot.hits),
    Figure("hot_misses", "counter", "Reads that the in-process cache could not answer", lambda t: t.hot.misses),
    Figure("hot_entries", "gauge", "Records in the in-process cache", lambda t: len(t.hot.entries)),
    Figure(
        "hot_bytes", "gauge", "Estimated size in bytes of the records in the in-process cache",
        lambda t: t.hot.bytes,
    ),
    Figure(
        "refused_writes", "counter",
        "Refused writes by reason (conflict, fenced, locked, deleted, exists, backpressure, full, ...)",
        lambda t: {(reason,): count for reason, count in list(t.warm.refused.items())}, ("reason",),
    ),
    Figure("retries", "counter", "Commands sent again because Redis did not answer", lambda t: t.warm.retried),
    Figure(
        "durability_missed", "counter",
        "Writes that were applied but whose durability was not confirmed, by requested level",
        lambda t: {(level,): count for level, count in list(t.confirming.missed.items())}, ("level",),
    ),
    Figure("leases_held", "gauge", "Records locked by this replica", lambda t: t.leases.held),
    Figure("leases_lost", "counter", "Locks lost before their holder released them", lambda t: t.leases.lost),
    Figure(
        "lock_timeouts", "counter", "Locks that were not acquired within the time to wait",
        lambda t: t.leases.timeouts,
    ),
    Figure(
        "tokens", "counter", "Tokens that models read (input) and wrote (output), as turns name them",
        lambda t: {key: each.sum for key, each in list(t.telemetry.tokens.items())}, ("model", "type"),
    ),
    Figure("turns_stopped", "counter", "Turns of this replica that were asked to stop", lambda t: t.leases.stopped),
    Figure("chunks_streamed", "counter", "Chunks that turns streamed", lambda t: t.leases.outputs.streamed),
    Figure(
        "chunks_dropped", "counter", "Streamed chunks that Redis could not store: it was full, or did not answer",
        lambda t: t.leases.outputs.dropped,
    ),
    Figure("output_followers", "gauge", "Followers of turns in this replica", lambda t: len(t.followers)),
    Figure("sessions_served", "counter", "Turns of handlers that were committed", lambda t: t.work.served),
    Figure("handler_failures", "counter", "Turns of handlers that failed", lambda t: t.work.failed),
    Figure(
        "stuck_sessions", "gauge",
        "Sessions whose handler failed so often that no worker calls it again, according to SQL",
        _of_sql(lambda seen: float(seen.stuck)),
    ),
    Figure(
        "link_up", "gauge", "Whether the subscription to Redis works: 1 or 0; absent until it is needed", _link_up,
    ),
    Figure(
        "link_silence_seconds", "gauge",
        "Seconds since the subscription to Redis last answered a probe; absent until it is needed",
        lambda t: t.link.silence,
    ),
    Figure("link_breaks", "counter", "Number of times the subscription to Redis was lost", lambda t: t.link.breaks),
    Figure(
        "unarchived_bytes", "gauge",
        "Bytes of unarchived commits kept in memory; the setting unarchived_bytes is their limit",
        lambda t: t.unarchived.bytes,
    ),
    Figure("archived_commits", "counter", "Commits that this replica archived in SQL", lambda t: t.archiver.archived),
    Figure("archived_partitions", "gauge", "Partitions that this replica archives", lambda t: len(t.archiver.mine)),
    Figure(
        "journal_entries", "gauge", "Unarchived commits in the journals that this replica archives",
        lambda t: sum(count for count, _ in _journals(t).values()),
    ),
    Figure(
        "journal_bytes", "gauge", "Size in bytes of the unarchived commits in the journals that this replica archives",
        lambda t: sum(size for _, size in _journals(t).values()),
    ),
    Figure(
        "journal_fill_ratio", "gauge",
        "Fill ratio, 0 to 1, of the fullest journal that this replica archives; a full one refuses writes",
        _fill,
    ),
    Figure(
        "journal_full_seconds", "gauge",
        "Seconds until the first journal archived here is full at its present rate; infinite if none grows",
        lambda t: min(_seconds_left(t).values(), default=None),
    ),
    Figure(
        "archive_lag_seconds", "gauge",
        "Age in seconds of the oldest unarchived commit in the journals that this replica archives",
        _lag,
    ),
    Figure(
        "journal_seen_seconds", "gauge",
        "Seconds since the figures of the journals were last updated; absent before the first update",
        lambda t: None if (found := _seen(t)) is None else found[1],
    ),
    Figure(
        "redis_memory_ratio", "gauge",
        "Highest share of maxmemory that eviction cannot free, of any Redis server; absent without maxmemory",
        _of_redis(lambda seen: seen.memory),
    ),
    Figure(
        "redis_connections_ratio", "gauge", "Highest connected_clients/maxclients of any Redis server",
        _of_redis(lambda seen: seen.connections),
    ),
    Figure(
        "sql_connections_ratio", "gauge", "Connections of PostgreSQL divided by max_connections; absent for SQLite",
        _of_sql(lambda seen: seen.connections),
    ),
    Figure(
        "epochs_minted", "gauge",
        "Partitions restarted in the last ten minutes because Redis lost data, according to SQL",
        _of_sql(lambda seen: float(seen.minted)),
    ),
    Figure(
        "sql_seen_seconds", "gauge",
        "Seconds since the figures of SQL were last updated; absent before the first update",
        _sql_age,
    ),
    Figure(
        "archiver_failing", "gauge",
        "Whether the last archiving attempt of this replica failed: 1 or 0; the log gives the reason",
        lambda t: float(bool(t.archiver.failure)),
    ),
    Figure(
        "diverged_partitions", "gauge",
        "Partitions not archived because the journal does not continue the archive or SQL refuses an entry",
        lambda t: len(_diverged(t)),
    ),
    Figure(
        "partition_diverged", "gauge",
        "Whether the partition is not archived: 1; its journal does not continue the archive, or SQL refuses an entry",
        lambda t: _by_partition(dict.fromkeys(_diverged(t), 1.0)), ("partition",),
    ),
    Figure(
        "sql_up", "gauge", "Whether SQL answered the last request: 1 or 0", lambda t: float(not t.cold.away)
    ),
    Figure(
        "quarantined_entries", "gauge", "Entries of this namespace in the quarantine in SQL; absent until counted",
        lambda t: t.archiver.quarantined,
    ),
    Figure(
        "quarantined_newest", "gauge",
        "Version of the newest entry in the quarantine; the labels give its record and the reason",
        _newest_quarantined, ("record", "reason"),
    ),
    Figure("indexed_records", "counter", "Records that this replica indexed for search", _indexed),
    Figure(
        "unindexed_records", "gauge",
        "Records with changes that the search index lacks; absent until counted and while search is off",
        lambda t: follower_of(t).behind,
    ),
    Figure("branched_commits", "counter", "Commits that this replica stored in branches", lambda t: t.branches.commits),
    Figure(
        "branches", "gauge", "Branches of this namespace in SQL; absent until counted",
        lambda t: t.branches.count,
    ),
    Figure(
        "expired_sessions", "counter", "Sessions that this replica ended because they expired",
        lambda t: sum(each.expired for each in _reapers(t)),
    ),
    Figure("events_emitted", "counter", "Events written by this replica", lambda t: t.warm.emitted),
    Figure("events_handled", "counter", "Events delivered to handlers", lambda t: _handled(t, "handled")),
    Figure("events_failed", "counter", "Events whose handler raised an error", lambda t: _handled(t, "failed")),
    Figure(
        "events_slow", "counter", "Events whose handler ran longer than the setting slow_handler",
        lambda t: _handled(t, "slowed"),
    ),
    Figure(
        "events_waiting", "gauge", "Events received but not delivered to a handler yet",
        lambda t: t.consumers.waiting,
    ),
    Figure(
        "events_replayed", "counter", "Events read from the stream later because they were not received live",
        lambda t: t.consumers.replayed,
    ),
    Figure(
        "resyncs", "counter",
        "Resyncs delivered to consumers: events are missing, and the consumer must reload its state",
        lambda t: t.consumers.resyncs,
    ),
    Figure(
        "restarted_partitions", "counter", "Partitions that this replica restarted because Redis lost data",
        lambda t: t.recovery.count,
    ),
    Figure(
        "complete_restarts", "counter",
        "Partitions that this replica started again after Redis was restarted or promoted, with nothing missing",
        lambda t: t.recovery.complete,
    ),
    Figure(
        "redis_refusing", "gauge", "Whether Redis refuses the heartbeat for this reason: 1 or 0",
        lambda t: t.heartbeat.refusals, ("reason",),
    ),
    Figure(
        "failed_starts", "gauge",
        "Hosts where a replica failed to start in the last ten minutes and none has started since",
        _of_redis(lambda seen: float(seen.failed_starts)),
    ),
    Figure(
        "expected_workers", "gauge", "Workers that should be ready, by the setting expected_workers; absent without it",
        lambda t: t.settings.expected_workers or None,
    ),
    Figure(
        "maintenance_seconds", "gauge",
        "Seconds until the end of the announced maintenance, 0 without one; absent until the time of Redis is known",
        lambda t: t.maintenance.seconds,
    ),
    Figure(
        "replicas_lost", "counter", "Replicas without a heartbeat that this replica reported as lost",
        lambda t: t.heartbeat.lost,
    ),
)  # fmt: skip

BY_PARTITION = (
    Figure(
        "partition_journal_entries", "gauge", "Unarchived commits, by partition",
        lambda t: _by_partition({each: count for each, (count, _) in _journals(t).items()}), ("partition",),
    ),
    Figure(
        "partition_journal_full_seconds", "gauge",
        "Seconds until the journal is full at its present rate, by partition; infinite if it does not grow",
        lambda t: _by_partition(_seconds_left(t)), ("partition",),
    ),
    Figure(
        "partition_archive_lag_seconds", "gauge", "Age in seconds of the oldest unarchived commit, by partition",
        lambda t: _by_partition(_lags(t)), ("partition",),
    ),
)  # fmt: skip


try:
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigurationError(
        "prometheus-client is not installed: pip install 'distributed-state[telemetry]'"
    ) from error

PREFIX = "distributed_state_"
_MANY_PARTITIONS = 64

# Name, help, labels; by the first word of the operations that `telemetry` reports.
OPERATIONS = (
    "operation_duration_seconds", "Seconds that operations on Redis and SQL took", ("operation", "tier", "outcome"),
)  # fmt: skip
LOCK_WAITS = "lock_wait_seconds", "Seconds that callers waited for a lock, by outcome", ("outcome",)
TURN_PARTS = (
    "turn_seconds", "Seconds of a turn spent in each part: lock, read, tool (all added up), model, elsewhere, commit",
    ("part",),
)  # fmt: skip
HISTOGRAMS = OPERATIONS, LOCK_WAITS, TURN_PARTS
# By the names of OpenTelemetry's conventions, if the environment asks for them.
TOKEN_USAGE = (
    "gen_ai_client_token_usage", "Number of input and output tokens used",
    ("gen_ai_request_model", "gen_ai_token_type", "gen_ai_operation_name"),
)  # fmt: skip


class StoreCollector(Collector):
    """The collector that prometheus_client calls at each scrape. May be used from any thread."""

    def __init__(self, store: AsyncStateStore, by_partition: bool) -> None:
        self._store = store
        self._figures = FIGURES + (BY_PARTITION if by_partition else ())
        self._tiers()

    def _tiers(self) -> Tiers | None:
        """The tiers, if the store is open; the first call switches their timing on."""
        tiers = lifecycle_of(self._store).tiers_in_use
        if tiers is not None:
            tiers.telemetry.measure()
        return tiers

    def describe(self) -> Iterator[Metric]:
        """The metrics without values."""
        for figure in self._figures:
            yield _family(figure)
        for name, text, labels in HISTOGRAMS:
            yield HistogramMetricFamily(PREFIX + name, text, labels=labels)

    def collect(self) -> Iterator[Metric]:
        """The present metrics."""
        tiers = self._tiers()
        if tiers is None:
            return
        for figure in self._figures:
            family = _family(figure)
            for labels, value in _values(figure, tiers).items():
                family.add_metric(labels, value)
            yield family
        times = dict(tiers.telemetry.times)
        operations = {key: each for key, each in times.items() if key[0] != "lease.acquire"}
        waits = {(outcome,): each for (name, _, outcome), each in times.items() if name == "lease.acquire"}
        yield _histogram(OPERATIONS, operations)
        yield _histogram(LOCK_WAITS, waits)
        yield _histogram(TURN_PARTS, {(part,): each for part, each in dict(tiers.telemetry.turn_parts).items()})
        if tiers.telemetry.genai:
            tokens = {(*key, "chat"): each for key, each in dict(tiers.telemetry.tokens).items()}
            yield _histogram(TOKEN_USAGE, tokens, "")


def collector(store: StateStore | AsyncStateStore, *, by_partition: bool | None = None) -> StoreCollector:
    """Make the collector of a store, to be registered: `REGISTRY.register(collector(store))`. One store a registry.

    From now on the store measures times. `by_partition` says whether journals and lags are also reported for each
    partition; by default if there are at most 64. Neither this nor a scrape asks any server.
    """
    core: AsyncStateStore = core_of(store)
    few = core.settings.partitions <= _MANY_PARTITIONS
    return StoreCollector(core, few if by_partition is None else by_partition)


@contextmanager
def serve(store: StateStore | AsyncStateStore, port: int, host: str = "0.0.0.0") -> Iterator[int]:
    """Serve GET /metrics inside `with`, for a process without an HTTP server; returns the port, also for 0: any."""
    registry = CollectorRegistry()
    process(registry)
    registry.register(collector(store))
    with serve_registry(registry, port, host) as served:
        yield served


@contextmanager
def serve_registry(registry: CollectorRegistry, port: int, host: str = "0.0.0.0") -> Iterator[int]:
    """Serve GET /metrics of this registry inside `with`; returns the port."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"metrics cannot be served on {host}:{port}: {error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def process(registry: CollectorRegistry) -> None:
    """Add metrics of the process itself: its memory, its CPU time, its open files. Only on Linux.

    prometheus_client's own registry has them already.
    """
    ProcessCollector(registry=registry)


def _family(figure: Figure) -> Any:
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    return kind(PREFIX + figure.name, figure.help, labels=figure.labels)


def _values(figure: Figure, tiers: Tiers) -> Labelled:
    value = figure.read(tiers)
    return {} if value is None else value if isinstance(value, dict) else {(): value}


def _histogram(
    what: tuple[str, str, tuple[str, ...]], times: dict[Any, Times], prefix: str = PREFIX
) -> HistogramMetricFamily:
    name, text, labels = what
    family = HistogramMetricFamily(prefix + name, text, labels=labels)
    for key, each in sorted(times.items()):
        sofar = 0
        buckets = []
        for limit, count in zip([*map(str, each.buckets), "+Inf"], each.counts, strict=True):
            sofar += count
            buckets.append((limit, sofar))
        family.add_metric(key, buckets, each.sum)
    return family
