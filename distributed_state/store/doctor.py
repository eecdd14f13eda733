"""Checks of the servers and the fleet. Law: a setup that would lose data is refused at open; other findings are advice.

The state of the fleet is read from Redis, where every replica reports it: which replicas archive, how far behind they
are, and which processes could not start. A process with a wrong SQL password has no heartbeat and no metrics, so it
leaves a note in Redis (`FailedStart`); the newest note of a host counts, and a successful start removes it.

If one server is down, the other one is still checked (`examine_apart`).

Design: sections 10, 27.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType

from distributed_state.cold.store import MINTED, NEWEST, NONE_MINTED, ColdStore
from distributed_state.errors import ConfigurationError, CorruptState, NotFound, StateError, WarmUnavailable
from distributed_state.port import Port
from distributed_state.port.blocking import finish
from distributed_state.port.commands import of_its_disk
from distributed_state.port.connections import Connections
from distributed_state.port.shared import SharedPort
from distributed_state.results import Finding, Replica
from distributed_state.search.follower import Follower
from distributed_state.settings import Settings
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec
from distributed_state.values.keys import SLOTS, Keys
from distributed_state.values.levels import ARCHIVED, MEMORY, Level
from distributed_state.warm.answers import PartitionState
from distributed_state.warm.heartbeat import release

log = logging.getLogger(__name__)
_KEPT = 600.0  # seconds: a container that fails repeatedly is restarted at least every five minutes
_LETTERS = 300


_MANY_BEHIND = 10_000  # records
_CROWDED = 0.8  # of a limit
_REFUSED = 60.0  # seconds for which a refused write is reported
_FLOOR = (7, 0)
_ELECTION = 2.0  # seconds until a new primary has been elected and is known
_DB = re.compile(r"db\d+")
Info = dict[str, str]


async def check_server(port: Port, level: Level = MEMORY) -> list[Finding]:
    """Check version, eviction, role, persistence and memory of each server, and whether a cluster is complete.

    `level` is the durability of writes: with "archived" SQL has the data before it is acknowledged, so Redis needs no
    file.
    """
    findings: list[Finding] = []
    cluster: dict[str, Info] = {}
    silent: list[WarmUnavailable] = []
    nodes = port.nodes()
    for node in nodes:
        try:
            info = await server_info(port, node, b"INFO")
            found = _server(info, level)
            if info.get("cluster_enabled") == "1":
                cluster[node] = info
        except WarmUnavailable as error:
            silent.append(error)
            found = [away(error)]
        except ConfigurationError as error:
            if "not a Redis" in str(error) or "refused user" in str(error):
                raise
            found = [Finding("server", False, str(error), "allow the INFO command, so that eviction can be checked")]
        findings += [replace(each, name=f"{node} {each.name}") for each in found] if len(nodes) > 1 else found
    if len(silent) == len(nodes):
        raise silent[0]
    return findings + (await _cluster(port, cluster) if cluster else [])


async def server_info(port: Port, node: str, *words: bytes) -> Info:
    """Parse a server's answer of lines `name:value`."""
    text = (await port.command_with(node, *words)).decode(errors="replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


async def _cluster(port: Port, primaries: Mapping[str, Info]) -> list[Finding]:
    """Whether every slot is served, and whether the cluster survives the loss of a primary."""
    state = await server_info(port, next(iter(primaries)), b"CLUSTER", b"INFO")
    served = state.get("cluster_slots_ok", "0")
    findings = [
        Finding(
            "cluster", state.get("cluster_state") == "ok" and int(served) == SLOTS,
            f"{len(primaries)} primaries, {served} of {SLOTS} slots served",
            "records of the other slots cannot be reached: run redis-cli --cluster check, then --cluster fix",
        )
    ]  # fmt: skip
    for node, info in primaries.items():
        replicas = info.get("connected_slaves", "0")
        advice = "give it a replica: without one, its partitions are unavailable while it is down"
        findings.append(Finding(f"{node} replicas", replicas != "0", replicas, advice))
    return findings


async def _sentinels(port: Port) -> list[Finding]:
    """Whether the sentinels are reachable, agree, and are enough to elect another primary."""
    every = await port.thread(port.sentinels)
    answering = [each for each in every if not each.problem]
    if not every:
        return []
    silent = "; ".join(f"{each.node}: {each.problem}" for each in every if each.problem)
    findings = [Finding("sentinels", not silent, f"{len(answering)} of {len(every)} answer", f"start them: {silent}")]
    if not answering:
        return findings
    named = sorted({(each.epoch, each.primary) for each in answering}, reverse=True)
    shown = ", ".join(f"{primary} (config epoch {epoch})" for epoch, primary in named)
    advice = "the one with the highest epoch is used; if this lasts, run SENTINEL RESET on the others"
    findings.append(Finding("sentinels' primary", len(named) == 1, shown, advice))
    quorums = ", ".join(sorted({str(each.quorum) for each in answering}))
    refused = next((each.no_failover for each in answering if each.no_failover), "")
    found = f"{quorums} must agree that the primary is down; " + (refused or "a failover can be started")
    advice = "start more Sentinels: if the primary is lost, it is not replaced"
    findings.append(Finding("quorum", not refused, found, advice))
    return findings


async def _durability(tiers: Tiers) -> Finding:
    """The default durability of writes, and whether it can be reached now."""
    level = tiers.confirming.level.text
    try:
        missing = await tiers.warm.retry(tiers.confirming.possible, tiers.confirming.level)
    except StateError as error:
        return Finding("durability", False, f"{level}: {error}", "every write raises DurabilityUnknown")
    found = level if not missing else f"{level}, which cannot be reached now: {'; '.join(missing)}"
    return Finding("durability", not missing, found, "start them: until then every write raises DurabilityUnknown")


async def _times(tiers: Tiers) -> list[Finding]:
    """How far apart the clocks are."""
    apart = []
    for node in tiers.port.nodes():
        try:
            seconds, micros = await tiers.port.command_with(node, b"TIME")
        except WarmUnavailable:
            continue  # a finding above names it
        apart.append(tiers.port.wall() - int(seconds) - int(micros) / 1e6)
    most = max(map(abs, apart), default=0.0)
    findings = [Finding("clock", most < 5, f"{most:.3f} s apart", "run NTP here and on the servers")]
    if len(apart) > 1:
        spread = max(apart) - min(apart)
        advice = "run NTP on the servers: a write whose answer was lost relies on it"
        findings.append(Finding("servers' clocks", spread < 1, f"{spread:.3f} s apart", advice))
    return findings


async def _failover(tiers: Tiers) -> list[Finding]:
    """How long a cluster's partition may be unavailable, or be served by a primary that was demoted."""
    retry_for = tiers.settings.retry_for
    option = b"cluster-node-timeout"
    try:
        found = await tiers.port.command_with(tiers.port.nodes()[0], b"CONFIG", b"GET", option)
    except StateError as error:
        return [Finding("failover", True, f"{option.decode()} is not known: {error}")]
    seconds = int(found[1]) / 1000
    return [
        Finding(
            "failover", retry_for > seconds + _ELECTION,
            f"after {seconds:g} s (cluster-node-timeout) and an election; calls wait for {retry_for:g} s (retry_for)",
            "raise retry_for above both, or lower cluster-node-timeout; retry_for must also outlast the move of a "
            "partition's slot, which answers TRYAGAIN until it is handed over",
        ),
        Finding("isolation", True, f"a primary that is cut off may be read for {seconds:g} s more, and hot with it"),
    ]  # fmt: skip


def _server(info: Info, level: Level) -> list[Finding]:
    """Findings from one server's own figures."""
    version = info.get("valkey_version") or info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    policy = info.get("maxmemory_policy", "noeviction")
    limit = int(info.get("maxmemory", 0))
    role = info.get("role", "master")
    clients = int(info.get("maxclients", 0))
    return [
        Finding("version", numbers >= _FLOOR, version, "use Redis 7.0 or Valkey 7.2, or newer", fatal=True),
        Finding(
            "eviction", not policy.startswith("allkeys"), policy,
            f"maxmemory-policy {policy} evicts what is not archived yet: CONFIG SET maxmemory-policy volatile-lru",
            fatal=True,
        ),
        Finding(
            "cache", policy.startswith("volatile") or limit == 0, f"{policy}, maxmemory {limit}",
            "with maxmemory set, volatile-lru lets archived records make room",
        ),
        Finding("role", role == "master", role, "a read-only replica: give the address of its primary", fatal=True),
        _persistence(info, level),
        _memory(info),
        *([_connections("connections", int(info.get("connected_clients", 0)), clients)] if clients else []),
    ]  # fmt: skip


_DISK = "make room on the disk of Redis, or enlarge it; writes continue by themselves then. Its log names other causes"


def _persistence(info: Info, level: Level) -> Finding:
    """Whether Redis has an append-only file, and can write its files."""
    files = {"aof_last_write_status": "append-only file", "rdb_last_bgsave_status": "RDB file"}
    failing = [file for name, file in files.items() if info.get(name) == "err"]
    if failing:
        return Finding("persistence", False, f"Redis cannot write its {' and its '.join(failing)}", _DISK)
    if info.get("loading") == "1":  # until it has loaded its append-only file, it reports that it has none
        return Finding("persistence", True, "Redis is loading its files")
    persistent = info.get("aof_enabled") == "1"
    advice = "without appendonly yes, commits that are not archived yet are lost when Redis restarts"
    return Finding("persistence", persistent or level is ARCHIVED, "AOF" if persistent else "no AOF", advice)


_FULL = (
    "when it is full of data that cannot be evicted, Redis refuses writes: archive it (see sql, archivers, lag), raise "
    "maxmemory, or expire idle sessions (session_idle)"
)


def _memory(info: Info) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    lasting = lasting_share(info)
    found = f"{used / 2**20:.0f} MB" + (f" of {limit / 2**20:.0f}" if limit else "")
    if lasting is not None and lasting < used / limit:
        found += f", about {lasting * limit / 2**20:.0f} MB of it cannot be evicted"
    return Finding("memory", lasting is None or lasting < _CROWDED, found, _FULL)


def lasting_share(info: Info) -> float | None:
    """The share of a server's maxmemory that eviction cannot free; None without maxmemory.

    With a volatile policy, Redis evicts keys that have an expiry, which only archived records have; the server knows
    how many these are, but not their size. As it evicts them, the estimate approaches the true share.
    """
    limit = int(info.get("maxmemory", 0))
    if not limit:
        return None
    share = int(info.get("used_memory", 0)) / limit
    if not info.get("maxmemory_policy", "").startswith("volatile"):
        return share
    counts = [dict(each.split("=") for each in line.split(",")) for name, line in info.items() if _DB.fullmatch(name)]
    keys = sum(int(each["keys"]) for each in counts)
    return share * (keys - sum(int(each["expires"]) for each in counts)) / keys if keys else share


def _connections(name: str, used: int, most: int) -> Finding:
    """The number of connections, and the limit of the server."""
    advice = "raise the server's limit, or run fewer replicas: at the limit, a new replica cannot start"
    return Finding(name, used < _CROWDED * most, f"{used} of {most}", advice)


def refuse(findings: list[Finding], place: str) -> None:
    """Raise ConfigurationError for the first finding that would lose data."""
    for finding in findings:
        if finding.fatal and not finding.ok:
            raise ConfigurationError(f"{place}: {finding.name} is {finding.found}; {finding.advice}")


async def examine(tiers: Tiers, *, embedded: bool) -> list[Finding]:
    """All findings of `distributed-state doctor`. If one server is down, the other is still examined."""
    layout = f"{tiers.keys.partitions} partitions in namespace {tiers.keys.namespace}"
    findings = [Finding("layout", True, layout)]  # checked against Redis and SQL when the store was opened
    try:
        findings += await _warm(tiers, embedded=embedded)
        replicas, unknown = await present(tiers)  # only once: an unanswered attempt takes `retry_for`
        findings += unknown or (here(tiers) if embedded else await fleet(tiers, replicas))
        found = await diverged_partitions(tiers, replicas)
        await tiers.maintenance.refresh()
    except StateError as error:
        findings.append(away(error))
        found = dict(tiers.archiver.diverged)
    announced = tiers.maintenance.current
    findings += [Finding("maintenance", True, str(announced))] if announced else []
    return findings + _diverged(found) + await _archive(tiers) + await _index(tiers)


async def _warm(tiers: Tiers, *, embedded: bool) -> list[Finding]:
    """Findings about Redis."""
    findings = (
        [Finding("server", True, "embedded in this process")]
        if embedded
        else await tiers.warm.retry(check_server, tiers.port, tiers.confirming.level)
    )
    keys = tiers.keys.partition(0)
    try:
        await tiers.warm.partitions.tail(keys)
        findings.append(Finding("scripts", True, "Lua runs"))
    except StateError as error:
        findings.append(Finding("scripts", False, str(error), "allow EVAL and EVALSHA"))
    findings += await _sentinels(tiers.port)
    findings += [await _durability(tiers), *await _times(tiers)]
    if any(finding.name == "cluster" for finding in findings):
        findings += await _failover(tiers)
    return findings + await lag(tiers)


def away(error: StateError) -> Finding:
    """The finding that Redis is unavailable, with the reason."""
    return Finding("server", False, str(error), _DISK if of_its_disk(error) else "start it, or let a replica take over")


def _diverged(found: Mapping[int, str]) -> list[Finding]:
    """The partitions that are not archived because journal and archive do not match, or SQL refuses an entry."""
    advice = (
        "make room in SQL, or fix the problem that the message names, and archiving continues; if the journal does not "
        "continue the archive, distributed-state repair --dry-run shows what SQL lacks, and repair archives it"
    )
    return [Finding(f"partition {each}", False, why, advice) for each, why in sorted(found.items())]


async def _index(tiers: Tiers) -> list[Finding]:
    """How complete the index is, if search is on."""
    followers = [each for each in tiers.workers if isinstance(each, Follower)]
    failure = "".join(each.failure for each in followers)
    try:
        if await tiers.port.sql(tiers.cold.search.settings) is None:
            advice = "open with search= again, or run `distributed-state index`, which continues indexing"
            return [Finding("index", False, failure, advice)] if failure else []
        reached = await followers[0].reached()
    except StateError as error:
        return [Finding("index", False, str(error), "see the message")]
    left_out = [name for each in followers for name in each.left_out]
    found = f"{reached.behind} of {reached.records} records have changes that it lacks"
    found += f"; {failure}" if failure else ""
    found += f"; `embed` refuses {', '.join(left_out)}" if left_out else ""
    advice = "open the archiving replicas with search=, or run `distributed-state index`, which shows the problem"
    return [Finding("index", reached.behind < _MANY_BEHIND and not failure and not left_out, found, advice)]


async def _archive(tiers: Tiers) -> list[Finding]:
    """Findings about SQL that need attention."""
    try:
        facts = await tiers.port.sql(tiers.cold.check)
        return archive(facts if tiers.settings.url else facts | {MINTED: ""})  # embedded: starts empty
    except StateError as error:
        return [no_archive(error)]


def no_archive(error: StateError) -> Finding:
    """The finding that SQL is unavailable, with the reason."""
    advice = "see the message; until SQL answers, only data in Redis is served, and journals fill"
    return Finding("sql", False, str(error), advice)


def archive(facts: dict[str, str]) -> list[Finding]:
    """Findings about SQL that need attention, from its own figures."""
    judged = {"quarantined", "erasures", "branched records", "stuck", "connections", "most connections", MINTED, NEWEST}
    findings = [Finding(f"sql {name}", True, value) for name, value in facts.items() if name not in judged]
    if "connections" in facts:
        findings.append(_connections("sql connections", int(facts["connections"]), int(facts["most connections"])))
    pending = facts.get("erasures", "0")
    advice = "these erasures are not complete: an archiver completes them, or repeat the request"
    findings.append(Finding("sql erasures", pending == "0", f"{pending} pending", advice))
    poison = facts.get("quarantined", "0")
    said = poison if NEWEST not in facts else f"{poison}; the newest: {facts[NEWEST]}"
    findings.append(
        Finding("sql quarantine", poison == "0", said, "see the table quarantine, which has each entry with its reason")
    )
    if minted := facts.get(MINTED):
        advice = "Redis lost data or may have lost data: see the log of the worker that started these epochs"
        findings.append(Finding("epochs", minted == NONE_MINTED, minted, advice))
    diverged = facts.get("branched records", "0")
    advice = (
        "list them with distributed-state branches; fork those you need (fork --branch), then store.admin.drop_branch"
    )
    stuck = facts.get("stuck", "0")
    retry = "list them with `distributed-state sessions --stuck`, fix their handler, then call session.retry()"
    findings.append(Finding("stuck sessions", stuck == "0", f"sessions that are no longer served: {stuck}", retry))
    findings.append(Finding("branches", diverged == "0", f"{diverged} records have branches", advice))
    return findings


def examine_apart(settings: Settings, error: StateError) -> list[Finding]:
    """Findings without an open store, if one of the two servers is down or SQL is empty. For blocking callers."""
    if isinstance(error, WarmUnavailable):
        return [away(error), *_archive_alone(settings)]
    advice = (
        "correct --archive and --namespace, or start a worker with them; `distributed-state migrate` creates the tables"
    )
    empty = Finding("sql", False, str(error), advice)
    return [*finish(_warm_alone(settings)), empty if isinstance(error, NotFound) else no_archive(error)]


def _archive_alone(settings: Settings) -> list[Finding]:
    try:
        cold = ColdStore.open(
            settings.archive or "", settings.namespace, migrate=False,
            snapshot_every=settings.snapshot_every, timeout=settings.sql_timeout,
        )  # fmt: skip
        with closing(cold):
            return archive(cold.check())
    except StateError as error:
        return [no_archive(error)]


async def _warm_alone(settings: Settings) -> list[Finding]:
    port = SharedPort(Connections(settings.url, settings.timeout, retry_for=settings.retry_for))
    try:
        await port.open()
        return await check_server(port)
    except StateError as error:
        return [away(error)]
    finally:
        await port.close()


_OLD = 60.0  # seconds that a commit may wait for SQL before it needs attention
_RECENT = 600.0  # seconds for which a loss in Redis is reported
_NAMED = 5  # partitions, in one line
_STOPPED = "see the message: this archiver makes no progress until then"


def here(tiers: Tiers) -> list[Finding]:
    """The failure of an embedded store's archiver, which has no other replicas to report it or archive instead."""
    failure = tiers.archiver.failure
    return [Finding("archiver", False, failure, _STOPPED)] if failure else []


async def present(tiers: Tiers) -> tuple[list[Replica], list[Finding]]:
    """The live replicas; if they cannot be listed, an empty list and a finding."""
    try:
        return await tiers.heartbeat.replicas(), []
    except StateError as error:
        return [], [Finding("replicas", False, str(error), "see the message: the replicas cannot be listed")]


async def fleet(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """The workers, the archiving replicas, those that fail or could not start, and whether all run one release."""
    findings = [*_workers(tiers.settings.expected_workers, replicas), *_archivers(tiers, replicas)]
    return [*findings, *await _unstarted(tiers), *_reported(tiers, replicas), _versions(replicas)]


def _workers(expected: int, replicas: list[Replica]) -> list[Finding]:
    """Whether as many services run as expected; nothing if any number is right."""
    if not expected:
        return []
    running = sum(each.role.split(" + ")[0] == "service" for each in replicas)
    advice = "start the others, or set expected_workers to the number that should run; `replicas` lists those that do"
    return [Finding("workers", running >= expected, f"{running} of {expected} expected workers run", advice)]


async def _unstarted(tiers: Tiers) -> list[Finding]:
    """The replicas that could not start."""
    advice = "see the message; it is forgotten as soon as one starts there, or after ten minutes"
    try:
        failed = await lately(tiers)
    except StateError as error:
        return [Finding("starts", False, str(error), advice)]
    return [
        Finding(
            f"start on {each.host}", False,
            f"process {each.pid}, release {each.version}, could not start {each.ago:.0f} s ago: {each.why}",
            advice,
        )
        for each in failed
    ]  # fmt: skip


def _archivers(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """The replicas that archive partitions according to their heartbeats, and this store even before its first one."""
    count = tiers.keys.partitions
    at_work = [each for each in replicas if each.positions.get("archives", 0)]
    taken = min(count, sum(each.positions["archives"] for each in at_work))
    here = tiers.settings.archiver
    found = f"{len(at_work)} of {len(replicas)} replicas archive {taken} of {count} partitions"
    advice = "start `distributed-state archiver`: until then nothing reaches SQL, and full journals refuse writes"
    if tiers.cold.away:
        advice = "SQL is unavailable, and archivers wait for it: see sql; until then full journals refuse writes"
    findings = [Finding("archivers", bool(at_work) or here, found, advice)]
    return findings + [
        Finding(f"archiver {each.id}", False, f"{each.host}, process {each.pid}: {each.archiving}", _STOPPED)
        for each in replicas
        if each.archiving
    ]


def _reported(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """Refused writes, restarts and losses of Redis, as reported lately by the replicas that met them."""
    findings = []
    ago = tiers.clock.now() - max((each.stats.get("full_at", 0) for each in replicas), default=0)
    if ago <= _REFUSED:
        text = f"writes are refused because Redis is full, the last {max(0.0, ago):.0f} s ago"
        findings.append(Finding("full", False, text, _FULL))
    if found := _lately(tiers, replicas, "output_dropped"):
        text = f"chunks that turns streamed were dropped, {found}: their followers are shown that some are missing"
        findings.append(Finding("output", False, text, "Redis is full, or did not answer for long: see its findings"))
    if found := _lately(tiers, replicas, "complete"):
        text = f"Redis was restarted or promoted, and nothing is missing: partitions were started again, {found}"
        findings.append(Finding("restarted redis", True, text))
    if found := _lately(tiers, replicas, "restarted"):
        advice = (
            "see the log of Redis: was it emptied, restarted without its file, or replaced? SQL has all archived "
            "commits; the log of the replica that started the partition again counts those that are missing"
        )
        text = f"Redis lost data, or may have: partitions were started again, {found}"
        findings.append(Finding("lost data", False, text, advice))
    return findings


def _lately(tiers: Tiers, replicas: list[Replica], kind: str) -> str:
    """How often that happened, and when last; "" if that was long ago."""
    ago = tiers.clock.now() - max((each.stats.get(f"{kind}_at", 0) for each in replicas), default=0)
    count = sum(each.stats.get(kind, 0) for each in replicas)
    return f"{count} so far, the last {max(0.0, ago):.0f} s ago" if ago <= _RECENT else ""


def _versions(replicas: list[Replica]) -> Finding:
    found = Counter(each.version or "unknown" for each in replicas)
    shown = ", ".join(f"{number} of {version}" for version, number in sorted(found.items()))
    return Finding("releases", len(found) < 2, shown or "no replica is running", "finish the upgrade, or roll it back")


@dataclass(frozen=True, slots=True)
class Journals:
    """The states of partitions whose server answers, and the age of the oldest unarchived commit of each."""

    places: dict[int, PartitionState]
    ages: dict[int, float]  # seconds, by the server's clock

    @property
    def behind(self) -> dict[int, PartitionState]:
        """The partitions with unarchived commits."""
        return {each: place for each, place in self.places.items() if place.offset > place.archived}


async def diverged_partitions(tiers: Tiers, replicas: Iterable[Replica]) -> dict[int, str]:
    """The partitions of all archivers that are not archived because journal and SQL do not match, with the reason.

    Combines SQL and the journals with the reports of this replica's archiver and of heartbeats.
    """
    reported = {int(each): why for replica in replicas for each, why in replica.diverged.items() if each.isdecimal()}
    here = dict(tiers.archiver.diverged)
    try:
        behind = await tiers.recovery.behind()
    except StateError:
        return reported | here  # a server that is down has its own finding
    # If another replica archives a partition now, that replica reports it.
    mine = behind.keys() | set(tiers.archiver.mine)
    return behind | reported | {each: why for each, why in here.items() if each in mine}


async def look(tiers: Tiers, partitions: Iterable[int] | None = None) -> Journals:
    """Look at these journals, or all, in at most two exchanges. Raises WarmUnavailable if no server answers."""
    asked = range(tiers.keys.partitions) if partitions is None else partitions
    keys = [tiers.keys.partition(each) for each in asked]
    found = Journals(await tiers.warm.partitions.reachable_states(keys) if keys else {}, {})
    return replace(found, ages=await ages(tiers, found.behind))


async def lag(tiers: Tiers) -> list[Finding]:
    """The number and age of the unarchived commits, and how full the journals are."""
    advice = "add archivers, or make SQL faster; `replicas` shows who archives"
    try:
        journals = await look(tiers)
    except StateError as error:
        return [Finding("archive lag", False, str(error), "see the message")]
    behind, old = journals.behind, journals.ages
    waiting = sum(place.offset - place.archived for place in behind.values())
    fills = {each: place.fill(tiers.settings) for each, place in behind.items()}
    fullest = max(fills.values(), default=0.0)
    found = f"{waiting} commit{'s' * (waiting != 1)}"
    found += f", the oldest {max(old.values()):.1f} s old" if old else ""
    found += f", the fullest journal {fullest:.0%} full" if behind else ""
    late = sorted(each for each, seconds in old.items() if seconds > _OLD or fills[each] > 0.5)
    found += f"; partitions {', '.join(map(str, late[:_NAMED]))}{', ...' * (len(late) > _NAMED)}" if late else ""
    return [Finding("archive lag", not late, found, advice)]


async def ages(tiers: Tiers, behind: Mapping[int, PartitionState]) -> dict[int, float]:
    """The age of the oldest unarchived commit of each partition, in seconds, by the server's clock."""
    if not behind:
        return {}
    asked = [(tiers.keys.partition(each), place.archived + 1) for each, place in behind.items()]
    journals = await tiers.warm.partitions.journals(asked, 1)
    now = tiers.clock.now()
    return {
        each: max(0.0, now - journal.onward[0].time_ms / 1000)
        for each, journal in zip(behind, journals, strict=True)
        if journal.onward
    }


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A process that could not open the store, `ago` seconds ago by the server's clock."""

    host: str
    pid: int
    version: str
    ago: float
    why: str


class Noting:
    """Notes in Redis why opening a store inside `async with` failed, if Redis answers and the store is a replica."""

    def __init__(self, port: Port, settings: Settings, keys: Keys) -> None:
        self._port = port
        self._keys = keys  # the number of partitions may still change
        self._active = settings.beat > 0 and settings.url is not None

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active or not (error is None or isinstance(error, StateError)):
            return
        if isinstance(error, WarmUnavailable):
            return
        try:
            if error is None:
                await self._port.command(b"HDEL", self._keys.failed_starts, platform.node())
            else:
                await self._note(str(error))
        except StateError as failure:
            log.debug(
                "the result of this start could not be saved: %s", failure
            )  # this must not hide the caller's error

    async def _note(self, why: str) -> None:
        key = self._keys.failed_starts
        seconds, _ = await self._port.command_with(self._port.node_of(key), b"TIME")
        card = {"pid": os.getpid(), "version": release(), "time": int(seconds), "why": why[:_LETTERS]}
        # Restarted containers have new names, and each note extends the hash's deadline, so old notes are removed here.
        words = await self._port.command(b"HGETALL", key)
        over = [host for host, note in _pairs(words) if _read("", note, float(seconds)) is None]
        await self._port.exchange(
            [
                (b"HDEL", key, platform.node(), *over),
                (b"HSET", key, platform.node(), codec.encode(card, "start")),
                (b"PEXPIRE", key, int(_KEPT * 1000)),
            ]
        )


async def lately(tiers: Tiers) -> list[FailedStart]:
    """The hosts on which a replica could not start, and has not started since."""
    words = await tiers.port.command(b"HGETALL", tiers.keys.failed_starts)
    now = tiers.clock.now()
    found = (_read(host.decode(), note, now) for host, note in _pairs(words))
    return [each for each in found if each is not None]


def _pairs(words: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(words[::2], words[1::2], strict=True)


def _read(host: str, card: bytes, now: float) -> FailedStart | None:
    """A host's note; None if it is too old or cannot be read."""
    try:
        stated = codec.decode(card, "start")
        ago = max(0.0, now - stated["time"])
        if ago >= _KEPT:
            return None
        return FailedStart(host, int(stated["pid"]), str(stated["version"]), ago, str(stated["why"]))
    except (CorruptState, KeyError, TypeError, ValueError) as error:
        log.debug("the note of host %s cannot be read: %s", host, error)
        return None
