"""Looks at the servers. Law: what would lose data is refused at open; the rest is advice.

Design: sections 10, 14.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_state.errors import ConfigurationError, StateError
from distributed_state.port import Port
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.scripts import MINT

_FLOOR = (7, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` says what to do when it is not `ok`."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    fatal: bool = False

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "advice", "")


async def check_server(port: Port) -> list[Finding]:
    """Version, eviction, role, persistence and memory of a Redis or Valkey server."""
    try:
        text = (await port.command(b"INFO")).decode(errors="replace")
    except ConfigurationError as error:
        if "not a Redis" in str(error) or "refused user" in str(error):
            raise
        return [Finding("server", False, str(error), "allow the INFO command, so that eviction can be checked")]
    info = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    version = info.get("valkey_version") or info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    policy = info.get("maxmemory_policy", "noeviction")
    limit = int(info.get("maxmemory", 0))
    role = info.get("role", "master")
    persistent = info.get("aof_enabled") == "1"
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
            "persistence", persistent, "AOF" if persistent else "no AOF",
            "without appendonly yes, commits that are not archived yet are lost when Redis restarts",
        ),
    ]  # fmt: skip


def refuse(findings: list[Finding], place: str) -> None:
    """Raise ConfigurationError for the first finding that would lose data."""
    for finding in findings:
        if finding.fatal and not finding.ok:
            raise ConfigurationError(f"{place}: {finding.name} is {finding.found}; {finding.advice}")


async def examine(tiers: Tiers, *, embedded: bool) -> list[Finding]:
    """Everything that `distributed-state doctor` shows."""
    findings = (
        [Finding("server", True, "embedded in this process")]
        if embedded
        else await tiers.warm.patiently(check_server, tiers.port)
    )
    keys = tiers.keys.partition(0)
    try:
        await tiers.warm.script(MINT, [keys.meta, keys.mint], ["doctor", 1])
        findings.append(Finding("scripts", True, "Lua runs"))
    except StateError as error:
        findings.append(Finding("scripts", False, str(error), "allow EVAL and EVALSHA"))
    seconds, micros = await tiers.warm.command(b"TIME")
    apart = abs(tiers.port.wall() - int(seconds) - int(micros) / 1e6)
    findings.append(Finding("clock", apart < 5, f"{apart:.3f} s apart", "run NTP here and on the server"))
    backlog = await tiers.archiver.backlog()
    waiting = sum(backlog.values())
    behind = waiting < tiers.settings.journal_entries // 2
    findings.append(Finding("archive lag", behind, f"{waiting} commits", "add archivers or make SQL faster"))
    layout = f"{tiers.keys.partitions} partitions in namespace {tiers.keys.namespace}"
    findings.append(Finding("layout", True, layout))  # compared with Redis and SQL when the store was opened
    for partition, why in tiers.archiver.diverged.items():
        findings.append(Finding(f"partition {partition}", False, why, "journal and archive do not belong together"))
    try:
        facts = await tiers.port.sql(tiers.cold.check)
        shown = facts.keys() - {"quarantined", "erasures"}
        findings += [Finding(f"sql {name}", True, value) for name, value in facts.items() if name in shown]
        pending = facts.get("erasures", "0")
        advice = "asked for and not complete: an archiver completes them, or the same request again"
        findings.append(Finding("sql erasures", pending == "0", f"{pending} pending", advice))
        poison = facts.get("quarantined", "0")
        findings.append(Finding("sql quarantine", poison == "0", poison, "look at the table quarantine"))
    except StateError as error:
        findings.append(Finding("sql", False, str(error), "see the message"))
    return findings
