"""The store as a whole: its replicas, partitions and servers. Law: it is for operators, who have the right `admin`."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from distributed_state.errors import AccessDenied
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources.shapes import Answer, Values
from distributed_state.programs.service.routes import Asked
from distributed_state.store import fleet_checks


class Replicas(Answer):
    """The replicas that are there."""

    replicas: list[Values]


class PartitionRow(Answer):
    """A partition: its epoch, the last offset of its journal, and how much of that waits for SQL.

    `lag` is the age of the oldest commit that waits, in seconds; `fill` is 1 where writes are refused; `diverged` says
    why nothing of it is archived, "" if that is not so.
    """

    partition: int
    epoch: str
    offset: int
    waiting: int
    bytes: int
    lag: float
    fill: float
    diverged: str


class Partitions(Answer):
    """The partitions whose server answers."""

    partitions: list[PartitionRow]


class FindingRow(Answer):
    """What a doctor found, and what to do about it if it is not `ok`."""

    name: str
    ok: bool
    found: str
    advice: str


class Findings(Answer):
    """What a doctor found of the servers and the fleet."""

    findings: list[FindingRow]


async def partitions(asked: Asked) -> Response:
    """How far each partition was written and archived."""
    if asked.caller.prefix:  # nothing of the store is asked here that would ask its policy
        raise AccessDenied(f"{asked.caller.actor!r:.80} is of one tenant, and this is of all")
    tiers = asked.store.tiers()
    looked = await fleet_checks.look(tiers)
    rows = [
        {
            "partition": each, "epoch": place.epoch, "offset": place.offset,
            "waiting": max(0, place.offset - place.archived), "bytes": max(0, place.waiting),
            "lag": looked.ages.get(each, 0.0), "fill": place.fill(tiers.settings),
            "diverged": tiers.archiver.diverged.get(each, ""),
        }
        for each, place in sorted(looked.places.items())
    ]  # fmt: skip
    return answer({"partitions": rows})


async def findings(asked: Asked) -> Response:
    """What a doctor finds of the servers and the fleet."""
    found = await asked.store.doctor()
    rows = [{"name": each.name, "ok": each.ok, "found": each.found, "advice": each.advice} for each in found]
    return answer({"findings": rows})


async def replicas(asked: Asked) -> Response:
    """The replicas of the store."""
    return answer({"replicas": [asdict(each) for each in await asked.store.replicas()]})
