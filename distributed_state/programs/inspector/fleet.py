"""The fleet: who is there, how far its work is, what somebody should look at. Law: a part that fails hides no other.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.inspector.api import Api, Refused
from distributed_state.programs.inspector.pages import moment, page

_PARTS = ("replicas", "partitions", "findings", "tenants")
# What a doctor names of a server of Redis, of several with its address before it.
_WARM = {"server", "version", "role", "eviction", "persistence", "memory", "connections", "cluster", "durability"}


async def fleet(request: Request, api: Api) -> Response:
    """Replicas, partitions, a doctor's findings and what tenants ask for."""
    replicas, partitions, findings, tenants = await asyncio.gather(*(_part(request, api, each) for each in _PARTS))
    rows, found = replicas["rows"], findings["rows"]
    return page(
        request, "fleet", replicas=replicas, partitions=partitions, findings=findings, tenants=tenants,
        tiers=_tiers(rows, found), losses=_losses(rows, found),
    )  # fmt: skip


async def _part(request: Request, api: Api, name: str) -> dict[str, Any]:
    """The rows of one part, or why there are none."""
    try:
        return {"rows": (await api.get(request, f"/v1/{name}")).json[name], "problem": ""}
    except Refused as refused:
        if refused.status in (401, 403):
            raise
        return {"rows": [], "problem": refused.detail}


class Tier(NamedTuple):
    """One of the three tiers: how many findings about it need somebody, and some words about it."""

    name: str
    wrong: int
    facts: str


def _tiers(replicas: list[dict[str, Any]], findings: list[dict[str, Any]]) -> list[Tier]:
    """Hot by what replicas say of themselves; warm and cold by what a doctor found of their servers."""
    hits, misses, records, size = (
        sum(each["stats"].get(f"hot_{name}", 0) for each in replicas) for name in ("hits", "misses", "entries", "bytes")
    )
    silent = sum("link_silence_ms" in each["stats"] and not each["stats"]["link_up"] for each in replicas)
    answered = f"{hits / (hits + misses):.0%} of {hits + misses} reads answered, " if hits + misses else ""
    hot = Tier(
        "Hot, in the replicas", silent, f"{answered}{records} record{'s' * (records != 1)}, {size / 2**20:.1f} MiB"
    )
    cold = [each for each in findings if each["name"].startswith("sql") or each["name"] in ("branches", "index")]
    warm = [each for each in findings if each not in cold and each["name"].rpartition(" ")[2] in _WARM]
    return [hot, _tier("Warm, Redis", warm), _tier("Cold, SQL", cold)] if findings else [hot]


def _tier(name: str, findings: list[dict[str, Any]]) -> Tier:
    # Where SQL is stands below, with all that was looked at.
    shown = [each for each in findings if each["name"] != "sql database"]
    facts = (f"{each['name'].removeprefix('sql ')}: {each['found']}" for each in shown)
    return Tier(name, sum(not each["ok"] for each in findings), "; ".join(facts))


def _losses(replicas: list[dict[str, Any]], findings: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """What was lost, branched and put aside, each with whether somebody should look."""
    count = sum(each["stats"].get("restarted", 0) for each in replicas)
    last = max((each["stats"].get("restarted_at", 0) for each in replicas), default=0)
    found = {each["name"]: each for each in findings}
    rows = [("Partitions that began anew, as Redis had lost data", f"{count}, the last {moment(last)} UTC", True)]
    rows = (
        rows
        if count
        else [("Partitions that began anew, as Redis had lost data", "none that a replica knows of", False)]
    )
    for name, what in ("branches", "Kept beside their records"), ("sql quarantine", "Entries that SQL did not take"):
        if name in found:
            rows.append((what, found[name]["found"], not found[name]["ok"]))
    return rows
