"""Looks at the servers. Law: what would lose data is refused at open; the rest is advice.

Design: sections 10, 27.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distributed_state.cold.inspection import MINTED, NEWEST, NONE_MINTED
from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port import Port
from distributed_state.search.follower import Follower
from distributed_state.store import fleet_checks
from distributed_state.store.finding import Finding
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import SLOTS
from distributed_state.values.levels import ARCHIVED, MEMORY, Level

_MANY_BEHIND = 10_000  # records
_CROWDED = 0.8  # of a limit
_FLOOR = (7, 0)
_ELECTION = 2.0  # seconds until a replica has been chosen and is known to have been
Info = dict[str, str]


async def check_server(port: Port, level: Level = MEMORY) -> list[Finding]:
    """Version, eviction, role, persistence and memory of each server, and whether they are a whole cluster.

    `level`: how hard writes are kept; what SQL has when it is acknowledged needs no file beside Redis.
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
    """What a node says in lines of `name:value`."""
    text = (await port.command_with(node, *words)).decode(errors="replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


async def _cluster(port: Port, primaries: Mapping[str, Info]) -> list[Finding]:
    """Whether every slot is served, and what is left if a primary is lost."""
    state = await server_info(port, next(iter(primaries)), b"CLUSTER", b"INFO")
    served = state.get("cluster_slots_ok", "0")
    findings = [
        Finding(
            "cluster", state.get("cluster_state") == "ok" and int(served) == SLOTS,
            f"{len(primaries)} primaries, {served} of {SLOTS} slots served",
            "records of the other slots cannot be reached: redis-cli --cluster check, and fix",
        )
    ]  # fmt: skip
    for node, info in primaries.items():
        replicas = info.get("connected_slaves", "0")
        advice = "give it a replica, or its partitions are away for as long as it is"
        findings.append(Finding(f"{node} replicas", replicas != "0", replicas, advice))
    return findings


async def _sentinels(port: Port) -> list[Finding]:
    """Whether those who choose the primary are there, agree, and are enough to choose another."""
    every = await port.thread(port.sentinels)
    heard = [each for each in every if not each.problem]
    if not every:
        return []
    silent = "; ".join(f"{each.node}: {each.problem}" for each in every if each.problem)
    findings = [Finding("sentinels", not silent, f"{len(heard)} of {len(every)} answer", f"start them: {silent}")]
    if not heard:
        return findings
    named = sorted({(each.epoch, each.primary) for each in heard}, reverse=True)
    shown = ", ".join(f"{primary} (config epoch {epoch})" for epoch, primary in named)
    advice = "the highest epoch is followed; SENTINEL RESET on those that have stayed behind, if it lasts"
    findings.append(Finding("sentinels' primary", len(named) == 1, shown, advice))
    quorums = ", ".join(sorted({str(each.quorum) for each in heard}))
    refused = next((each.no_failover for each in heard if each.no_failover), "")
    found = f"{quorums} must find the primary away; " + (refused or "a failover can be started")
    advice = "start more Sentinels: if the primary is lost, nobody replaces it"
    findings.append(Finding("quorum", not refused, found, advice))
    return findings


async def _durability(tiers: Tiers) -> Finding:
    """The level of writes that say none themselves, and whether it can be kept now."""
    level = tiers.confirming.level.text
    try:
        missing = await tiers.warm.patiently(tiers.confirming.possible, tiers.confirming.level)
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
            continue  # it was named above
        apart.append(tiers.port.wall() - int(seconds) - int(micros) / 1e6)
    most = max(map(abs, apart), default=0.0)
    findings = [Finding("clock", most < 5, f"{most:.3f} s apart", "run NTP here and on the servers")]
    if len(apart) > 1:
        spread = max(apart) - min(apart)
        advice = "run NTP on the servers: a write whose answer was lost relies on it"
        findings.append(Finding("servers' clocks", spread < 1, f"{spread:.3f} s apart", advice))
    return findings


async def _failover(tiers: Tiers) -> list[Finding]:
    """How long a partition of a cluster may be away, or be read at a primary that is none any more."""
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
    """What one server says of itself."""
    version = info.get("valkey_version") or info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    policy = info.get("maxmemory_policy", "noeviction")
    limit = int(info.get("maxmemory", 0))
    role = info.get("role", "master")
    persistent = info.get("aof_enabled") == "1"
    used = int(info.get("used_memory", 0))
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
        Finding(
            "persistence", persistent or level is ARCHIVED, "AOF" if persistent else "no AOF",
            "without appendonly yes, commits that are not archived yet are lost when Redis restarts",
        ),
        Finding(
            # Where archived records make room, memory is always nearly full.
            "memory", not limit or policy.startswith("volatile") or used < _CROWDED * limit,
            f"{used / 2**20:.0f} MB" + (f" of {limit / 2**20:.0f}" if limit else ""),
            "full, it refuses writes: raise maxmemory, or end sessions that idle (session_idle)",
        ),
        *([_connections("connections", int(info.get("connected_clients", 0)), clients)] if clients else []),
    ]  # fmt: skip


def _connections(name: str, used: int, most: int) -> Finding:
    """How many there are, of those that a server allows."""
    advice = "raise the server's limit, or run fewer replicas: one more that finds no place cannot start"
    return Finding(name, used < _CROWDED * most, f"{used} of {most}", advice)


def refuse(findings: list[Finding], place: str) -> None:
    """Raise ConfigurationError for the first finding that would lose data."""
    for finding in findings:
        if finding.fatal and not finding.ok:
            raise ConfigurationError(f"{place}: {finding.name} is {finding.found}; {finding.advice}")


async def examine(tiers: Tiers, *, embedded: bool) -> list[Finding]:
    """Everything that `distributed-state doctor` shows. A server that is away hides nothing of the other one."""
    layout = f"{tiers.keys.partitions} partitions in namespace {tiers.keys.namespace}"
    findings = [Finding("layout", True, layout)]  # compared with Redis and SQL when the store was opened
    try:
        findings += await _warm(tiers, embedded=embedded)
        replicas, unknown = await fleet_checks.present(tiers)  # once: each time that nobody answers takes `retry_for`
        findings += unknown or (fleet_checks.here(tiers) if embedded else await fleet_checks.fleet(tiers, replicas))
        diverged = await fleet_checks.diverged(tiers, replicas)
    except StateError as error:
        findings.append(away(error))
        diverged = dict(tiers.archiver.diverged)
    return findings + _diverged(diverged) + await _archive(tiers) + await _index(tiers)


async def _warm(tiers: Tiers, *, embedded: bool) -> list[Finding]:
    """What is seen of Redis."""
    findings = (
        [Finding("server", True, "embedded in this process")]
        if embedded
        else await tiers.warm.patiently(check_server, tiers.port, tiers.confirming.level)
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
    return findings + await fleet_checks.lag(tiers)


def away(error: StateError) -> Finding:
    """Redis is away, and why."""
    return Finding("server", False, str(error), "start it, or let a replica take over")


def _diverged(found: Mapping[int, str]) -> list[Finding]:
    """The partitions of which nothing is archived: journal and archive do not fit, or SQL does not take an entry."""
    advice = (
        "make room in SQL, or mend what it names, and archiving goes on; where journal and archive do not fit, "
        "distributed-state repair --dry-run shows what Redis has and SQL lacks; without it, brings that to SQL"
    )
    return [Finding(f"partition {each}", False, why, advice) for each, why in sorted(found.items())]


async def _index(tiers: Tiers) -> list[Finding]:
    """How far the index is, where search is on."""
    followers = [each for each in tiers.workers if isinstance(each, Follower)]
    failure = "".join(each.failure for each in followers)
    try:
        if await tiers.port.sql(tiers.cold.search.settings) is None:
            advice = "open with search= again, or run `distributed-state index`, which goes on with it"
            return [Finding("index", False, failure, advice)] if failure else []
        reached = await followers[0].reached()
    except StateError as error:
        return [Finding("index", False, str(error), "see the message")]
    left_out = [name for each in followers for name in each.left_out]
    found = f"{reached.behind} of {reached.records} records have changes that it lacks"
    found += f"; {failure}" if failure else ""
    found += f"; `embed` refuses {', '.join(left_out)}" if left_out else ""
    advice = "open with search= what archives, or run `distributed-state index`, which shows what is in the way"
    return [Finding("index", reached.behind < _MANY_BEHIND and not failure and not left_out, found, advice)]


async def _archive(tiers: Tiers) -> list[Finding]:
    """What SQL has that somebody should look at."""
    try:
        facts = await tiers.port.sql(tiers.cold.check)
        return archive(facts if tiers.settings.url else facts | {MINTED: ""})  # embedded it begins empty at each start
    except StateError as error:
        return [no_archive(error)]


def no_archive(error: StateError) -> Finding:
    """SQL is away, and why."""
    advice = "see the message; until SQL is there Redis serves what it has, and journals fill"
    return Finding("sql", False, str(error), advice)


def archive(facts: dict[str, str]) -> list[Finding]:
    """What SQL has that somebody should look at, of what it says of itself."""
    judged = {"quarantined", "erasures", "branched records", "connections", "most connections", MINTED, NEWEST}
    findings = [Finding(f"sql {name}", True, value) for name, value in facts.items() if name not in judged]
    if "connections" in facts:
        findings.append(_connections("sql connections", int(facts["connections"]), int(facts["most connections"])))
    pending = facts.get("erasures", "0")
    advice = "asked for and not complete: an archiver completes them, or the same request again"
    findings.append(Finding("sql erasures", pending == "0", f"{pending} pending", advice))
    poison = facts.get("quarantined", "0")
    said = poison if NEWEST not in facts else f"{poison}; the newest: {facts[NEWEST]}"
    findings.append(Finding("sql quarantine", poison == "0", said, "the table quarantine has each, with its reason"))
    if minted := facts.get(MINTED):
        advice = "Redis lost data, or may have: the log of who began them says what, and why"
        findings.append(Finding("epochs", minted == NONE_MINTED, minted, advice))
    diverged = facts.get("branched records", "0")
    advice = "distributed-state branches shows them; fork what is wanted (fork --branch), then drop_branch()"
    findings.append(Finding("branches", diverged == "0", f"{diverged} records have branches", advice))
    return findings
