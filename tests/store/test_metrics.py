"""What a store tells of its work, as metrics and spans. Law: never a user's value, and nothing when off."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from below import hidden, keys_of, own_server, redis_of, tiers, until
from clocks import moved_by_hand
from diverging import QUIET, keep, lose
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scraping import Scrape, undressed
from sqlalchemy import create_engine
from sync_api import Blocking

from distributed_state import (
    Backpressure,
    ColdUnavailable,
    ConfigurationError,
    Conflict,
    Fenced,
    LockTimeout,
    StateError,
    StateStore,
    Stopped,
)
from distributed_state.programs.servers import free_port
from distributed_state.store import watch
from distributed_state.store.metrics import serve

OPERATIONS, WAITS = "operation_duration_seconds_count", "lock_wait_seconds_count"


@pytest.fixture(scope="session")  # a worker may come back to this module
def exporter() -> InMemorySpanExporter:
    """Where the spans of this process end up; the SDK takes one provider for good."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter
    exporter.clear()


def of(spans: InMemorySpanExporter, name: str) -> list[dict[str, Any]]:
    """The attributes of the spans of this name, without their prefix."""
    return [
        {key.removeprefix("distributed_state."): value for key, value in (span.attributes or {}).items()}
        for span in spans.get_finished_spans()
        if span.name == f"distributed_state.{name}"
    ]


# Figures


async def test_hot_reads_are_counted_and_measured(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")
    await session.set("a", "x" * 100)
    before = scrape("hot_hits_total")
    assert before is not None

    async def hit() -> bool:
        await session.get("a")
        return (scrape("hot_hits_total") or 0) > before

    await until(hit)
    found = scrape.all()
    assert found[("distributed_state_hot_entries",)] == 1
    assert 100 < found[("distributed_state_hot_bytes",)] < 2000
    assert found[("distributed_state_hot_misses_total",)] >= 1
    assert found[("distributed_state_link_up",)] == 1
    assert found[("distributed_state_link_silence_seconds",)] < 5


async def test_operations_are_told_by_tier_and_outcome(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")
    for value in range(3):
        await session.set("a", value)
    with pytest.raises(Conflict):
        await session.set("a", 9, expect_version=1)
    await session.get("a", fresh=True)
    async with store.batch() as batch:
        batch.on(session).set("b", 1)
    assert scrape(OPERATIONS, "commit", "warm", "ok") == 3
    assert scrape(OPERATIONS, "commit", "warm", "conflict") == 1
    assert scrape(OPERATIONS, "commit_many", "warm", "ok") == 1
    assert (scrape(OPERATIONS, "read", "warm", "ok") or 0) >= 1
    before = scrape(OPERATIONS, "hydrate", "cold", "ok") or 0
    assert await store.session("another").get("a") is None
    assert scrape(OPERATIONS, "hydrate", "cold", "ok") == before + 1
    assert scrape("refused_writes_total", "conflict") == 1
    assert scrape("refused_writes_total", "fenced") == 0, "else the rate of the first would be missed"


async def test_buckets_add_up(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")
    for value in range(20):
        await session.set("a", value)
    families = text_string_to_metric_families(generate_latest(scrape.registry).decode())
    family = next(each for each in families if each.name == "distributed_state_operation_duration_seconds")
    commits = [each for each in family.samples if each.labels.get("operation") == "commit"]
    buckets = [each.value for each in commits if each.name.endswith("_bucket")]
    (count,) = (each.value for each in commits if each.name.endswith("_count"))
    (seconds,) = (each.value for each in commits if each.name.endswith("_sum"))
    assert buckets == sorted(buckets)
    assert buckets[-1] == count == 20
    assert 0 < seconds < 100


@pytest.mark.wide
async def test_many_at_once_leave_the_figures_whole(store: Any) -> None:
    """Threads count without a lock: one may be missed, none is invented, and the buckets still add up."""
    scrape, many = Scrape(store), [store.session(f"s{n}") for n in range(10)]

    async def work(session: Any) -> None:
        for value in range(8):
            await session.set("a", value)
            scrape.all()

    await asyncio.gather(*(work(session) for session in many))
    count = scrape(OPERATIONS, "commit", "warm", "ok")
    assert count is not None
    assert 72 <= count <= 80
    assert count == scrape("operation_duration_seconds_bucket", "commit", "warm", "ok", "+Inf")


async def test_nothing_is_timed_until_somebody_collects(store: Any, spans: InMemorySpanExporter) -> None:
    session = store.session("s")
    await session.set("a", 1)
    async with session.lock():
        await session.set("a", 2)
    await store.emit("a.b")
    home = tiers(store)
    assert not home.telemetry.on
    assert home.telemetry.times == {}
    assert spans.get_finished_spans() == ()
    Scrape(store)
    await session.set("a", 3)
    assert home.telemetry.times


async def test_a_fenced_write_and_a_lost_lock_are_counted(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")
    with pytest.raises(StateError):
        async with session.lock(ttl=1.5) as lease:
            assert scrape("leases_held") == 1
            with redis_of(store) as client:
                client.delete(keys_of(store, "s").lock)
            with pytest.raises(Fenced):
                await session.set("a", 1)
            await until(lambda: lease.lost)
            raise Conflict("the sync API ends no body")
    assert scrape("refused_writes_total", "fenced") == 1
    assert scrape(OPERATIONS, "commit", "warm", "fenced") == 1
    await until(lambda: scrape("leases_lost_total") == 1)
    assert scrape("leases_held") == 0


async def test_where_the_time_of_turns_goes_is_measured(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:  # nobody collects yet
        turn["n"] = 0
    scrape = Scrape(store)
    turn = session.turn()
    go_on = moved_by_hand(turn)
    async with turn:
        for seconds in 2, 20:
            with turn.model("gpt-5"):
                go_on(seconds)
        turn["n"] = 1
    with pytest.raises(KeyError):
        async with session.turn() as turn:
            raise KeyError
    counts = {part: scrape("turn_seconds_count", part) for part in ("lock", "read", "elsewhere", "model", "commit")}
    assert counts == {"lock": 2, "read": 2, "elsewhere": 2, "model": 1, "commit": 1}
    assert scrape("turn_seconds_sum", "model") == 22
    assert scrape("turn_seconds_bucket", "model", "30.0") == 1
    assert scrape("turn_seconds_count", "tool") is None


async def test_waiting_for_a_lock_is_measured(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")

    async def wait_in_vain() -> None:
        with pytest.raises(LockTimeout):
            await session.lock(wait=0.2).acquire()

    async with session.lock():
        await asyncio.create_task(wait_in_vain())
    assert scrape(WAITS, "ok") == 1
    assert scrape(WAITS, "timeout") == 1
    assert scrape("lock_timeouts_total") == 1
    assert (scrape("lock_wait_seconds_sum", "timeout") or 0) >= 0.19


@pytest.mark.replicas
async def test_the_lag_of_the_archive_grows_while_sql_is_held_up(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    store = await opener(archive_every=0.01)
    scrape, session = Scrape(store), store.session("s")
    partition = str(keys_of(store, "s").partition)
    await session.set("a", 0)
    await until(lambda: scrape("archived_commits_total") == 1)
    assert scrape("archived_partitions") == store.settings.partitions
    await until(lambda: scrape("archive_lag_seconds") == 0)
    engine = create_engine(opener.archive)
    with engine.connect() as connection:
        lock = "BEGIN EXCLUSIVE" if engine.dialect.name == "sqlite" else "LOCK TABLE cursors IN ACCESS EXCLUSIVE MODE"
        connection.exec_driver_sql(lock)
        for value in range(5):
            await session.set("a", value)
        await until(lambda: (scrape("archive_lag_seconds") or 0) > 0.3)
        assert (scrape("partition_archive_lag_seconds", partition) or 0) > 0.3
        assert (scrape("journal_entries") or 0) >= 1
        assert (scrape("journal_bytes") or 0) > 0
        assert 0 < (scrape("journal_fill_ratio") or 0) < 0.01
        assert (scrape("partition_journal_entries", partition) or 0) >= 1
        # What is seen of Redis goes on, though the archiver waits.
        archived = scrape("archived_commits_total")
        for _ in range(3):
            entries = scrape("journal_entries") or 0
            await session.set("a", 9)
            await until(lambda entries=entries: (scrape("journal_entries") or 0) > entries)
        assert (scrape("journal_seen_seconds") or 0) < 5
        assert scrape("archived_commits_total") == archived
        connection.rollback()
    engine.dispose()
    await until(lambda: scrape("archived_commits_total") == 9)
    await until(lambda: scrape("archive_lag_seconds") == 0 and scrape("journal_entries") == 0)
    assert (scrape(OPERATIONS, "archive", "cold", "ok") or 0) >= 2


@pytest.mark.replicas
async def test_a_partition_that_diverged_lags(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is on its way to SQL, and that is no reason to say that nothing waits."""
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    writer = await opener(archiver=False)
    for value in range(3):
        await writer.session("s").set("a", value)
    with redis_of(writer) as client:
        client.xdel(keys_of(writer, "s").journal, b"2-0")
    scrape = Scrape(await opener(archive_every=0.01))
    partition = str(keys_of(writer, "s").partition)
    await until(lambda: scrape("diverged_partitions") == 1)
    await until(lambda: (scrape("partition_archive_lag_seconds", partition) or 0) > 0.5)
    assert scrape("partition_journal_entries", partition) == 2 == scrape("journal_entries")


@pytest.mark.only(api="asyncio")
async def test_figures_of_a_server_that_is_away_say_how_old_they_are(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(retry_for=1.0)
        scrape = Scrape(store)
        await store.session("s").set("a", 1)
        with redis_of(store) as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used * 4)
        await until(lambda: 0.1 < (scrape("redis_memory_ratio") or 0) < 0.9)
        assert 0 < (scrape("redis_connections_ratio") or 0) < 0.5
        assert (scrape("journal_seen_seconds") or 9) < 2
        server.stop()
        await until(lambda: (scrape("journal_seen_seconds") or 0) > 2)


@pytest.mark.only(api="asyncio")
async def test_a_redis_full_of_what_cannot_be_evicted_is_told_from_one_full_of_what_can(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(durability="memory", retry_for=0.5)
        scrape = Scrape(store)
        number = itertools.count()

        async def fill() -> None:
            for _ in range(50):
                await store.session(f"s{next(number)}").set("text", "x" * 10_000)

        async def memory() -> Any:
            return next(each for each in await store.admin.doctor() if each.name == "memory")

        await fill()
        await store.admin.archive()
        with redis_of(store) as client:
            client.config_set("maxmemory-policy", "volatile-lru")
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_500_000)
            for _ in range(8):  # several times as much as there is room for
                await fill()
                await store.admin.archive()
            assert client.info("stats")["evicted_keys"] > 0
        await until(lambda: 0 < (scrape("redis_memory_ratio") or 0) < 0.8)
        assert (await memory()).ok
        assert "full" not in {each.name for each in await store.admin.doctor()}

        def away(*_: Any) -> None:
            raise ColdUnavailable("SQL is away")

        monkeypatch.setattr(tiers(store).cold, "archive", away)
        with pytest.raises(Backpressure):
            while True:
                await fill()
        await until(lambda: (scrape("redis_memory_ratio") or 0) > 0.8)
        assert not (await memory()).ok

        async def full() -> bool:
            findings = {each.name: each for each in await store.admin.doctor()}
            return "full" in findings and "writes are refused because Redis is full" in findings["full"].found

        await until(full)


async def test_what_turns_stream_is_counted_and_so_are_their_followers_and_stops(store: Any) -> None:
    scrape, session = Scrape(store), store.session("s")
    async with session.output(wait=5) as output:
        with pytest.raises(Stopped):
            async with session.turn(request_id="r") as turn:
                await turn.stream("a")
                await turn.stream("b")
                await turn.flush()
                assert await output.next(5) is not None
                assert scrape("output_followers") == 1
                assert (await session.stop("r", wait=0)).state == "stopping"
                await until(lambda: turn.stopping)
    assert scrape("output_followers") == 0
    assert scrape("chunks_streamed_total") == 2
    assert scrape("chunks_dropped_total") == 0
    assert scrape("turns_stopped_total") == 1


@pytest.mark.replicas
async def test_chunks_that_a_full_redis_could_not_store_are_counted_and_doctor_names_them(opener: Any) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(durability="memory", retry_for=0.5)
        scrape, session = Scrape(store), store.session("s")
        async with session.turn(request_id="r") as turn:
            with redis_of(store) as client:
                client.config_set("maxmemory-policy", "noeviction")  # else it might evict the lock
                client.config_set("maxmemory", 1)
                await turn.stream("a")
                await turn.stream("b")
                await turn.flush()
                client.config_set("maxmemory", 0)
            await turn.stream("c")
        assert scrape("chunks_dropped_total") == 2
        assert scrape("refused_writes_total", "full") == 1

        async def named() -> bool:
            return "2 so far" in {each.name: each.found for each in await store.admin.doctor()}.get("output", "")

        await until(named)
        shown = [type(part).__name__ async for part in session.output("r", wait=5)]
        assert shown == ["Truncated", "Chunk", "Ended"]


@pytest.mark.replicas
async def test_a_journal_is_told_of_by_whoever_archives_it(opener: Any) -> None:
    """So that the sum over all replicas is the fleet's."""
    writer, archiver = await opener(archiver=False), await opener(archive_every=0.01)
    at_writer, at_archiver = Scrape(writer), Scrape(archiver)
    await writer.session("s").set("a", 1)
    await until(lambda: at_archiver("archived_commits_total") == 1)
    assert at_writer("archived_partitions") == 0
    await until(lambda: at_archiver("partition_journal_entries", "0") == 0)
    assert at_writer("partition_journal_entries", "0") is None
    assert at_writer("archive_lag_seconds") is None
    assert at_writer("quarantined_entries") is None
    await until(lambda: at_archiver("quarantined_entries") == 0)  # counted after a pass


@pytest.mark.replicas
async def test_what_sql_set_aside_is_counted(opener: Any) -> None:
    quiet = await opener(archiver=False)
    session = quiet.session("s")
    await session.set("a", 1)
    with redis_of(quiet) as client:
        journal = keys_of(quiet, "s").journal
        ((identity, fields),) = client.xrange(journal)
        client.delete(journal)
        client.xadd(journal, fields | {b"d": fields[b"d"][:-1]}, id=identity)
    await quiet.admin.archive()
    scrape = Scrape(await opener(archive_every=0.01))
    await until(lambda: scrape("quarantined_entries") == 1)


@pytest.mark.replicas
async def test_what_diverged_is_counted(opener: Any) -> None:
    """The commits by whoever kept them, the branches by whoever archives."""
    quiet = await opener(**QUIET)
    session = quiet.session("s")
    lost = await lose(quiet, "s", lambda: session.set("a", 1))
    at_keeper = Scrape(quiet)
    assert at_keeper("branched_commits_total") == 0
    assert at_keeper("branches") is None
    kept = await keep(quiet, lost)
    tiers(quiet).branches.noted(kept)
    assert at_keeper("branched_commits_total") == 1
    at_archiver = Scrape(await opener(sweep=0.05))
    await until(lambda: at_archiver("branches") == 1, 60)


@pytest.mark.only(warm="single")
async def test_a_link_that_breaks_is_seen(opener: Any) -> None:
    with own_server(opener) as server:
        store = await opener(
            url=server.url, timeout=0.5, retry_for=1.0, op_window=5.0, unarchived_bytes=0, archiver=False, beat=0
        )
        scrape = Scrape(store)
        assert scrape("link_up") is None, "nobody needed it yet, so nothing is wrong"
        await store.session("s").set("a", 1)
        await store.session("s").get("a", fresh=True)
        await until(lambda: scrape("link_up") == 1)
        server.kill()
        await until(lambda: scrape("link_up") == 0)
        assert (scrape("link_breaks_total") or 0) >= 1
        with pytest.raises(StateError):
            await store.session("s").set("a", 2)
        assert scrape(OPERATIONS, "commit", "warm", "unavailable") == 1
        assert (scrape("retries_total") or 0) >= 1
        server.start()
        await until(lambda: scrape("link_up") == 1)


async def test_events_are_counted_from_writing_to_handling(store: Any) -> None:
    scrape = Scrape(store)
    kept: list[str] = []

    def handler(event: Any) -> None:
        kept.append(event.type)
        if event.type == "mail.bad":
            raise RuntimeError("on purpose")

    store.on("mail.*", handler)
    await store.session("s").set("a", 1)  # conversation.created goes with it
    await store.emit("mail.good")
    await store.emit("mail.bad")
    await until(lambda: scrape("events_handled_total") == 2)
    assert scrape("events_emitted_total") == 3
    assert scrape("events_failed_total") == 1
    assert scrape("events_slow_total") == 0
    assert scrape("events_waiting") == 0
    assert scrape(OPERATIONS, "event.handle", "handler", "ok") == 1
    assert scrape(OPERATIONS, "event.handle", "handler", "error") == 1
    await store.off(handler)
    assert scrape("events_handled_total") == 2, "a counter does not go back when a handler leaves"
    replayed = scrape("events_replayed_total") or 0
    async with store.events(since="oldest") as events:
        for _ in range(3):  # each partition's stream is read by itself
            assert await events.next(5) is not None
    assert (scrape("events_replayed_total") or 0) >= replayed + 3


async def test_a_resync_is_counted(opener: Any) -> None:
    store = await opener(partitions=1, kept_events=2)
    scrape = Scrape(store)
    await store.emit("a", subject="s")
    async with store.events() as events:
        begun = events.position
    for number in range(200):
        await store.emit("a", {"n": number}, subject="s")
    async with store.events(since=begun) as events:
        event = await events.next(10)
    assert event.type == "resync"
    assert scrape("resyncs_total") == 1


async def test_sessions_that_expire_are_counted(opener: Any) -> None:
    store = await opener(session_idle=0.05, sweep=0.02)
    scrape = Scrape(store)
    await store.session("s").set("a", 1)
    await until(lambda: scrape("expired_sessions_total") == 1)


@pytest.mark.replicas
async def test_a_lost_replica_is_counted(opener: Any) -> None:
    first, second = await opener(beat=0.1), await opener(beat=0.1)
    scrape = Scrape(first)
    await until(lambda: _count(first, 2))
    await tiers(second).heartbeat._job.stop()  # falls silent
    await until(lambda: scrape("replicas_lost_total") == 1)
    tiers(second).heartbeat._job = None


async def _count(store: Any, count: int) -> bool:
    return len(await store.admin.replicas()) == count


async def test_many_partitions_are_told_together(opener: Any) -> None:
    store = await opener(partitions=65)
    assert not [key for key in Scrape(store).all() if "partition_" in key[0]]
    scrape = Scrape(store, by_partition=True)
    await store.session("s").set("a", 1)
    await until(lambda: scrape("partition_journal_entries", "64") == 0)


async def test_a_closed_store_has_nothing_to_tell(opener: Any) -> None:
    store = await opener()
    scrape = Scrape(store)
    await store.close()
    assert scrape.all() == {}


async def test_a_process_without_a_server_serves_its_metrics(store: Any) -> None:
    def read(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    with serve(undressed(store), 0, "127.0.0.1") as port:
        await store.session("s").set("a", 1)
        assert 'operation="commit"' in await asyncio.to_thread(read, port)
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}"), serve(undressed(store), port, "127.0.0.1"):
            pass
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, port)


@pytest.mark.wide
def test_the_archiver_serves_its_metrics(servers: Any, tmp_path: Any, namespace: str) -> None:
    port, archive = free_port(), f"sqlite:///{tmp_path}/archive.db"
    words, urls = hidden("--url", servers.redis("valkey").url, "--archive", archive, "--namespace", namespace)
    command = [sys.executable, "-m", "distributed_state", *words, "archiver", "--metrics-port", str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | urls) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["message"] == "archiving"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert "distributed_state_archived_partitions" in answer.read().decode()
        process.terminate()
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err


# Spans


async def test_what_leaves_the_process_is_a_span(opener: Any, spans: InMemorySpanExporter) -> None:
    store = await opener(traces=True, archiver=False, durability="memory")
    session, partition = store.session("s"), keys_of(store, "s").partition
    await session.set("a", 1)
    await session.get("a", fresh=True)
    async with session.lock():
        await session.set("a", 2)
    await store.emit("mail.sent", subject=session)
    await store.admin.archive()
    about = {"scope": "session", "partition": partition, "tier": "warm", "outcome": "ok"}
    assert of(spans, "commit") == [about | {"kind": "set"}] * 2
    assert of(spans, "read") == [about]
    assert of(spans, "lease.acquire") == of(spans, "lease.hold") == of(spans, "lease.release") == [about]
    assert of(spans, "event.emit") == [{"partition": partition, "kind": "mail.sent", "tier": "warm", "outcome": "ok"}]
    assert of(spans, "archive") == [{"count": 1, "tier": "cold", "outcome": "ok"}]


async def test_spans_are_children_of_the_callers(opener: Any, spans: InMemorySpanExporter) -> None:
    """Also what is done in a thread or a task for it, as archiving before a commit returns."""
    store = await opener(traces=True, durability="archived", archiver=False)
    tiers(store).known_ids.add("session:s")  # SQL is asked whether it is new
    with trace.get_tracer("test").start_as_current_span("request"):
        if isinstance(store, Blocking):
            store.it.session("s").set("a", 1)
        else:
            await store.session("s").set("a", 1)
    found = {span.name.removeprefix("distributed_state."): span for span in spans.get_finished_spans()}

    def parent(name: str) -> int:
        inside = found[name].parent
        assert inside is not None, name
        return int(inside.span_id)

    assert parent("commit") == found["request"].context.span_id
    assert parent("hydrate") == parent("archive") == found["commit"].context.span_id
    assert len({span.context.trace_id for span in found.values()}) == 1


async def test_what_a_handler_does_is_inside_its_event(opener: Any, spans: InMemorySpanExporter) -> None:
    store = await opener(traces=True)

    def handler(event: Any) -> None:
        with trace.get_tracer("test").start_as_current_span("inside"):
            pass

    store.on("mail.*", handler)
    await store.emit("mail.sent")
    await until(lambda: of(spans, "event.handle"))
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found["inside"].parent.span_id == found["distributed_state.event.handle"].context.span_id
    assert of(spans, "event.handle")[0]["kind"] == "mail.sent"
    assert of(spans, "event.handle")[0]["outcome"] == "ok"


async def _private(store: Any) -> None:
    session = store.session("private-id", user="private-user", actor="private-actor")
    await session.write(set={"private-key": "private-value"}, append=[{"role": "user", "content": "private-text"}])
    with pytest.raises(Conflict):
        await session.set("private-key", "private-value", expect_version=99)
    async with session.lock():
        await session.get_all(fresh=True)
    store.on("mail.*", _fail)
    await store.emit("mail.sent", {"private": "private-data"}, subject=session)
    await until(lambda: tiers(store).handlings[0].failed)


def _fail(event: Any) -> None:
    raise ValueError("private-error")


def _told(spans: InMemorySpanExporter) -> str:
    return "\n".join(span.to_json() for span in spans.get_finished_spans() if span.name.startswith("distributed_state"))


async def test_a_span_tells_nothing_of_a_users(opener: Any, spans: InMemorySpanExporter) -> None:
    await _private(await opener(traces=True))
    assert "mail.sent" in _told(spans)
    assert "private" not in _told(spans)


async def test_the_search_for_a_users_would_find_it(opener: Any, spans: InMemorySpanExporter) -> None:
    """Negative control, and what `trace_ids` is for."""
    await _private(await opener(traces=True, trace_ids=True))
    assert "session:private-id" in _told(spans)
    assert "private-v" not in _told(spans)


async def test_a_refusal_is_an_outcome_and_a_failure_an_error(opener: Any, spans: InMemorySpanExporter) -> None:
    store = await opener(traces=True)
    await store.session("s").set("a", 1)
    with pytest.raises(Conflict):
        await store.session("s").set("a", 1, expect_version=9)
    refused = next(span for span in spans.get_finished_spans() if span.attributes["distributed_state.outcome"] != "ok")
    assert refused.attributes["distributed_state.outcome"] == "conflict"
    assert refused.status.status_code is trace.StatusCode.UNSET
    assert not refused.events
    store.on("mail.*", _fail)
    await store.emit("mail.sent")
    await until(lambda: of(spans, "event.handle"))
    (handled,) = (span for span in spans.get_finished_spans() if span.name.endswith("event.handle"))
    assert handled.status.status_code is trace.StatusCode.ERROR
    assert not handled.events


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_cancelled_wait_ends_its_span(opener: Any, spans: InMemorySpanExporter) -> None:
    store = await opener(traces=True)

    async def wait() -> None:
        await store.session("s").lock(wait=30).acquire()

    async with store.session("s").lock():
        waiting = asyncio.create_task(wait())
        await until(lambda: len(tiers(store).leases.waiters))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert sorted(each["outcome"] for each in of(spans, "lease.acquire")) == ["cancelled", "ok"]


# Without the packages

WITHOUT = """
import sys
for name in ("opentelemetry", "prometheus_client"):
    sys.modules[name] = None
from distributed_state import ConfigurationError, StateStore
with StateStore.open(archive="memory", traces=True) as store:
    session = store.session("s")
    session.set("a", 1)
    with session.lock():
        assert session.get("a", fresh=True) == 1
    store.emit("a.b")
    try:
        import distributed_state.store.metrics
    except ConfigurationError as error:
        print(error)
"""


@pytest.mark.wide
def test_without_the_packages_there_are_no_spans_and_no_errors() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "prometheus-client is not installed: pip install 'distributed-state[telemetry]'\n"


def test_both_apis_have_a_collector_before_they_are_used() -> None:
    """A server registers it when it starts; what its event loop does is found at the next scrape."""

    async def whole() -> None:
        from distributed_state import AsyncStateStore

        async with AsyncStateStore.open(archive="memory") as store:
            await store.session("s").set("a", 1)
            scrape = Scrape(store)
            await store.session("s").set("a", 2)
            assert scrape(OPERATIONS, "commit", "warm", "ok") == 1
            assert await asyncio.to_thread(scrape, OPERATIONS, "commit", "warm", "ok") == 1

    asyncio.run(whole())
    with StateStore.open(archive="memory") as store:
        scrape = Scrape(store)
        store.session("s").set("a", 1)
        assert scrape(OPERATIONS, "commit", "warm", "ok") == 1


# Tokens of models


async def spend(store: Any) -> None:
    async with store.session("private-id").turn() as turn:
        turn.model("gpt-5", input_tokens=812, output_tokens=90)
        turn.model("gpt-5", input_tokens=8)


async def test_tokens_are_a_metric_also_those_of_a_turn_that_fails(opener: Any) -> None:
    store = await opener()
    await spend(store)
    with pytest.raises(ZeroDivisionError):
        async with store.session("s").turn() as turn:
            turn.model("gpt-5", output_tokens=10)
            raise ZeroDivisionError
    for number in range(60):
        async with store.session("s").turn() as turn:
            turn.model(f"m{number}", input_tokens=1)
    registry = Scrape(store).registry

    def tokens(model: str, type: str) -> float | None:
        return registry.get_sample_value("distributed_state_tokens_total", {"model": model, "type": type})

    assert (tokens("gpt-5", "input"), tokens("gpt-5", "output")) == (820, 100)
    assert (tokens("m48", "input"), tokens("m49", "input")) == (1, None)
    assert tokens("(others)", "input") == 11, "names come from callers, and labels cost memory"
    assert "gen_ai" not in generate_latest(registry).decode()


@pytest.mark.parametrize("ids", [False, True])
async def test_gen_ai_conventions_are_kept_where_they_are_asked_for(
    opener: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, ids: bool
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http, gen_ai_latest_experimental")
    store = await opener(traces=True, trace_ids=ids)
    await spend(store)
    async with store.session("private-id").lock():
        pass
    first, second = (span for span in spans.get_finished_spans() if span.name.endswith("lease.hold"))
    attributes = {name: value for name, value in first.attributes.items() if name.startswith("gen_ai")}
    assert attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.usage.input_tokens": 820,
        "gen_ai.usage.output_tokens": 90,
        **({"gen_ai.conversation.id": "private-id"} if ids else {}),
    }
    assert not any(name.startswith("gen_ai") for name in second.attributes), "no turn"
    registry = Scrape(store).registry
    labels = {"gen_ai_request_model": "gpt-5", "gen_ai_token_type": "input", "gen_ai_operation_name": "chat"}
    assert registry.get_sample_value("gen_ai_client_token_usage_sum", labels) == 820
    assert registry.get_sample_value("gen_ai_client_token_usage_count", labels) == 2
    assert registry.get_sample_value("gen_ai_client_token_usage_bucket", labels | {"le": "16.0"}) == 1


async def test_gen_ai_conventions_are_in_development_and_need_a_wish(opener: Any, spans: InMemorySpanExporter) -> None:
    store = await opener(traces=True)
    await spend(store)
    assert not any(name.startswith("gen_ai") for span in spans.get_finished_spans() for name in span.attributes)


async def test_a_turn_of_a_session_with_a_handler_is_its_agents(
    opener: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental")
    store = await opener(traces=True)
    await store.session("s").post({"role": "user", "content": "hi"}, handler="support")
    async with store.session("s").turn() as turn:
        turn.take()
    (span,) = (span for span in spans.get_finished_spans() if span.name.endswith("lease.hold"))
    assert span.attributes["gen_ai.agent.name"] == "support"
    assert "gen_ai.usage.input_tokens" not in span.attributes
