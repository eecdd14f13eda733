"""Faults of servers that Sentinels watch. Law: only the Sentinels decide who is promoted, and when."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.fleet import Fleet
from tests.simulation.network import FROM, TO, Silence
from tests.simulation.plan import Fault
from tests.simulation.sentinels import Sentinels
from tests.simulation.world import Process


def harm(fleet: Fleet, sentinels: Sentinels, fault: Fault, live: Sequence[Process]) -> bool:
    """Cause a fault; False if it is not one of these."""
    group, now = fleet.group, fleet.world.now
    primary, long = group.primary, 0.3 + 2 * fault.lasts
    copy = [name for name in group.names if name != primary.name][fault.who % (len(group.names) - 1)]
    sentinel = list(sentinels.all.values())[fault.who % len(sentinels.all)]
    match fault.kind:
        case "crash primary":
            group.stop(primary.name, away=2 * fault.lasts, power_cut=fault.amount < 0.5)
        case "freeze primary":
            primary.frozen_until = max(primary.frozen_until, now + long)
        case "cut off primary":
            sentinels.isolate(primary.name, long)
            sentinel.alone_until = now + long * (fault.amount < 0.5)
            for process in live:
                _part(fleet, [*group.names, *sentinels.all], process, primary.name, sentinel.name, now + long)
        case "hand over":
            sentinels.hand_over()
        case "slow copies":
            group.slow(fault.amount, long)
        case "cut off copy":
            sentinels.isolate(copy, long)
        case "freeze copy":
            node = fleet.network.nodes[copy]
            node.frozen_until = max(node.frozen_until, now + long)
        case "crash copy":
            group.stop(copy, away=2 * fault.lasts, power_cut=fault.amount < 0.5)
        case "sentinel away":
            sentinel.away_until = max(sentinel.away_until, now + 2 * long)
        case "sentinel alone":
            sentinel.alone_until = max(sentinel.alone_until, now + 2 * long)
        case "made older":
            group.make_older(copy)
        case "rename":
            group.rename()
        case _:
            return False
    return True


def _part(fleet: Fleet, every: Sequence[str], process: Process, primary: str, sentinel: str, until: float) -> None:
    """Let a process reach only the primary and one Sentinel, only the others, or both; sometimes in one direction."""
    chance = fleet.world.chance
    side = chance.random()
    ways = chance.choice(((TO,), (FROM,), (TO, FROM), (TO, FROM)))
    others = [name for name in every if name not in (primary, sentinel)]
    cut = [] if side < 0.4 else [primary] if side < 0.7 else others
    fleet.world.note("cut off from", process.name, ", ".join(cut), "/".join(ways))
    fleet.network.silences += [Silence(process.name, way, until, node) for node in cut for way in ways]
