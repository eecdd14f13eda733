"""The plan of a run, everything but chance: its shape, operations and faults. Law: a plan follows from its seed.

A plan is made before the run, so that its operations and faults can be left out one by one while the failure remains.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

READS = ("get", "read", "messages", "item get")
WRITES = {
    "set": 4, "set if unchanged": 2, "set if equal": 1, "delete field": 1, "increment": 3, "append": 3, "turn": 6,
    "transaction": 2, "apply": 2, "locked": 2, "item put": 2, "item delete": 1, "tag": 1, "batch": 2, "durable": 2,
    "delete record": 1, "revive": 2, "clear": 1, "roll back": 2, "checkpoint": 1, "fork": 1, "keep secret": 2,
    "erase": 1, "set large": 1, "set brief": 1, "keep own": 2, "fork own": 1, "forget": 1, "write short": 2,
}  # fmt: skip
_GONE = ("erase", "forget", "keep secret", "keep own", "fork own", "write short", "delete record", "clear", "fork")


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of run. `faults`: how many of each kind; `pace`: mean seconds between two operations of a client."""

    replicas: int = 3
    clients: int = 6
    records: int = 3
    operations: int = 180
    pace: float = 0.05
    reads: float = 0.3
    mix: tuple[tuple[str, int], ...] = tuple(WRITES.items())
    faults: tuple[tuple[str, int], ...] = ()
    persistence: tuple[str, ...] = ("everysec",)  # one of these
    copies: int = 0  # replicas of each primary
    watched: tuple[bool, ...] = (False,)  # by Sentinels, one of these
    primaries: tuple[int, ...] = (0,)  # of a cluster, one of these; 0: a single server
    levels: tuple[str, ...] = ("fsynced", "archived")  # of durable writes
    cancelled: float = 0.05
    ttl: float = 2.0  # of leases
    listens: bool = False  # to events
    works: bool = False  # each replica has a worker
    settings: tuple[tuple[str, object], ...] = (
        ("warm_ttl", 1.0),
        ("partitions", 2),
        ("retry_for", 5.0),
        ("timeout", 1.0),
    )

    @property
    def dense(self) -> Shape:
        """Three times the operations in the same simulated time, with the same faults.

        Clients repeat any of their turns, so a record remembers as many requests as that takes.
        """
        settings = tuple((dict(self.settings) | {"remembered_requests": 200}).items())
        return replace(self, operations=3 * self.operations, pace=self.pace / 3, settings=settings)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a certain time. `who`: the replica, if it affects one; `amount`: its meaning depends on the kind."""

    number: int
    kind: str
    at: float
    lasts: float
    who: int
    amount: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a client. `draw` is the seed of its other choices."""

    number: int
    client: int
    kind: str
    record: int
    pause: float
    draw: int
    cancel_after: float | None

    @property
    def name(self) -> str:
        """The name under which this operation writes."""
        return f"op{self.number}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. `left_out`: operations and faults that are skipped, such as "o12" and "f3"."""

    seed: int
    shape: Shape
    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...]
    left_out: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, seed: int, shape: Shape) -> Plan:
        """Return the plan of a seed."""
        chance = random.Random(seed * 7919 + 17)
        kinds = [kind for kind, weight in shape.mix for _ in range(weight)]
        operations = []
        for number in range(shape.operations):
            kind = chance.choice(READS) if chance.random() < shape.reads else chance.choice(kinds)
            cancel = chance.expovariate(50) if chance.random() < shape.cancelled else None
            operations.append(
                Operation(
                    number, number % shape.clients, kind, chance.randrange(shape.records),
                    chance.expovariate(1 / shape.pace), chance.getrandbits(32), cancel,
                )
            )  # fmt: skip
        length = shape.operations / shape.clients * shape.pace
        faults = []
        for kind, count in shape.faults:
            for _ in range(chance.randint(0, count)):
                lasts, who = chance.expovariate(2.0), chance.randrange(shape.replicas)
                faults.append(Fault(len(faults), kind, chance.uniform(0, length), lasts, who, chance.random()))
        return cls(seed, shape, tuple(operations), tuple(faults))

    def without(self, *names: str) -> Plan:
        """Return the same plan without these operations and faults."""
        return replace(self, left_out=self.left_out | set(names))

    @property
    def names(self) -> list[str]:
        """All operations and faults that happen and could be left out."""
        found = [f"f{fault.number}" for fault in self.faults] + [f"o{each.number}" for each in self.operations]
        return [name for name in found if name not in self.left_out]


CALM = Shape()
LOSSY = replace(CALM, faults=(("lose messages", 3), ("silence", 2), ("freeze replica", 2)))
CRASHES = replace(CALM, faults=(("crash replica", 2), ("lose messages", 2), ("freeze replica", 2)))
RESTARTS = replace(
    CALM, persistence=("everysec", "everysec", "always", "rdb", "none"),
    faults=(("power cut", 2), ("restart server", 1), ("lose messages", 2), ("crash replica", 1)),
)  # fmt: skip
# Answers that arrive later than `op_window`.
LATE = replace(
    CALM, settings=tuple((dict(CALM.settings) | {"op_window": 4.0, "retry_for": 1.0, "timeout": 0.5}).items()),
    faults=(("lose messages", 3), ("freeze server", 3), ("freeze replica", 2), ("evict", 10), ("silence", 2)),
)  # fmt: skip
FULL = replace(CALM, faults=(("evict", 20), ("forget scripts", 2), ("lose messages", 2), ("freeze server", 2)))
SQL = replace(
    CALM, faults=(("sql away", 2), ("sql frozen", 1), ("sql loses answers", 3), ("disk full", 1), ("evict", 5))
)
# Mostly reads that hot may answer.
HOT = replace(
    CALM, replicas=2, clients=16, records=1, operations=120, pace=0.1, reads=0.0, mix=(("get", 6), ("set", 3)),
    faults=(("silence", 12),), settings=tuple((dict(CALM.settings) | {"partitions": 1, "max_staleness": 0.2}).items()),
)  # fmt: skip
# Maintenance during writes: history is packed, SQL is restored to an earlier state, Redis is emptied.
MAINTAINED = replace(
    CALM, pace=0.15, operations=150, mix=(*WRITES.items(), ("compact", 4)),
    settings=tuple((dict(CALM.settings) | {"op_window": 2.0, "retry_for": 0.6, "timeout": 0.4}).items()),
    faults=(("flush", 2), ("sql loses answers", 2), ("sql away", 1), ("evict", 10), ("crash replica", 1)),
)  # fmt: skip
RESTORED = replace(
    CALM, pace=0.1, operations=150, settings=tuple((dict(CALM.settings) | {"warm_ttl": 60.0}).items()),
    mix=tuple((kind, weight) for kind, weight in WRITES.items() if kind not in _GONE),
    faults=(("restore sql", 2), ("lose messages", 1), ("crash replica", 1), ("freeze replica", 1)),
)  # fmt: skip
LEASES = replace(
    CALM, ttl=0.3, mix=(("turn", 6), ("locked", 3), ("increment", 1), ("set", 1)), reads=0.1,
    faults=(("freeze replica", 6), ("lose messages", 2), ("silence", 3), ("clock jump", 2), ("freeze server", 1)),
)  # fmt: skip
# Turns that stream, those who follow them, and stops.
LIVE = replace(
    CALM, records=2, clients=8, operations=120, pace=0.2, reads=0.0, cancelled=0.03, replicas=3,
    mix=(("live", 4), ("live alone", 2), ("follow", 6), ("stop", 2), ("set", 1)),
    faults=(
        ("crash replica", 1), ("freeze replica", 2), ("freeze server", 1), ("silence", 2), ("lose messages", 1),
        ("drop subscribers", 2), ("power cut", 1), ("evict", 3), ("clock jump", 1), ("forget scripts", 1),
        ("server clock jump", 1),
    ),
    settings=(*CALM.settings, ("remembered_requests", 200), ("output_bytes", 65_536)),
)  # fmt: skip
LIVE_FAILOVER = replace(
    LIVE, copies=2, watched=(True,), settings=tuple((dict(LIVE.settings) | {"retry_for": 8.0}).items()),
    faults=(
        ("crash primary", 1), ("freeze primary", 1), ("cut off primary", 1), ("hand over", 2), ("slow copies", 1),
        ("crash replica", 1), ("lose messages", 1), ("freeze replica", 1), ("silence", 1),
    ),
)  # fmt: skip
LIVE_CLUSTER = replace(
    LIVE, primaries=(3,), records=4, settings=tuple((dict(LIVE.settings) | {"partitions": 6}).items()),
    faults=(
        ("move slot", 6), ("old map", 1), ("power cut", 1), ("silence of a server", 1), ("crash replica", 1),
        ("lose messages", 1), ("freeze replica", 1), ("drop subscribers", 1),
    ),
)  # fmt: skip
# Inputs are posted while turns run, fail and are taken over.
INBOX = replace(
    LIVE, pace=0.1, mix=(("post", 6), ("serve", 4), ("set", 1), ("turn", 1)), ttl=0.6,
    faults=(*LIVE.faults, ("flush", 1)), settings=(*LIVE.settings, ("inbox_limit", 200)),
)  # fmt: skip
# Workers serve what is posted, and wakes. No server's clock is set back: a write whose answer was lost and which was
# archived meanwhile would count as later than that.
WORK = replace(
    INBOX, works=True, reads=0.1, mix=(("post", 6), ("wake", 3), ("serve", 1), ("set", 1), ("turn", 1)), ttl=1.0,
    faults=(*(each for each in INBOX.faults if each[0] != "server clock jump"), ("power cut", 1), ("evict", 3)),
)  # fmt: skip
EVENTS = replace(
    CALM, pace=0.1, reads=0.05, records=6, listens=True,
    mix=(("emit", 12), ("set", 1), ("turn", 2), ("increment", 1), ("batch", 1), ("checkpoint", 1), ("clear", 1),
        ("delete record", 1), ("revive", 1), ("roll back", 1)),
    faults=(
        ("drop subscribers", 3), ("crash replica", 2), ("power cut", 1), ("restart server", 1), ("silence", 2),
        ("lose messages", 2), ("freeze replica", 2), ("freeze server", 1),
    ),
    settings=(*CALM.settings, ("handler_timeout", 2.0), ("kept_events", 50)),
)  # fmt: skip
CLUSTER = replace(
    CALM, records=6, listens=True, mix=(*WRITES.items(), ("emit", 4)), primaries=(3, 4, 6),
    persistence=("everysec", "everysec", "always", "rdb"),
    settings=tuple((dict(CALM.settings) | {"partitions": 6}).items()),
    faults=(
        ("move slot", 8), ("old map", 2), ("power cut", 1), ("restart server", 1), ("silence of a server", 2),
        ("freeze server", 2), ("lose messages", 2), ("silence", 1), ("crash replica", 1), ("drop subscribers", 1),
        ("evict", 5), ("forget scripts", 1), ("freeze replica", 1),
    ),
)  # fmt: skip
FAILOVER = replace(
    CLUSTER, copies=1, persistence=("everysec",), primaries=(3,), pace=0.1,
    settings=tuple((dict(CLUSTER.settings) | {"retry_for": 8.0}).items()),
    faults=(
        ("server away", 1), ("server stands still", 1), ("cut off", 2), ("move slot", 3), ("old map", 1),
        ("silence of a server", 1), ("lose messages", 1), ("crash replica", 1), ("evict", 3),
    ),
)  # fmt: skip
# Slots move while nodes restart without their last writes.
MOVED = replace(
    CALM, primaries=(3,), records=6, operations=120, pace=0.1, reads=0.0, cancelled=0.0,
    mix=(("append", 2), ("set", 3), ("increment", 1)), faults=(("move slot", 16), ("power cut", 6)),
    settings=(("warm_ttl", 0.3), ("partitions", 3), ("retry_for", 5.0), ("timeout", 1.0), ("archive_every", 0.02)),
)  # fmt: skip
_LEVELS = ("replicated", "replicated", "replicated:1", "fsynced", "archived")
ALL = replace(
    CALM, listens=True, copies=2, watched=(False, True), levels=_LEVELS, mix=(*WRITES.items(), ("emit", 4)),
    faults=tuple((kind, 1) for kind in (
        "lose messages", "silence", "freeze replica", "freeze server", "crash replica", "power cut", "restart server",
        "evict", "forget scripts", "drop subscribers", "clock jump", "sql away", "sql frozen", "sql loses answers",
        "disk full", "hand over", "crash primary", "freeze primary", "cut off primary", "slow copies", "cut off copy",
        "sentinel away", "made older",
    )),
)  # fmt: skip
SENTINEL = replace(
    CALM, pace=0.1, copies=2, watched=(True,), listens=True, mix=(*WRITES.items(), ("durable", 6), ("emit", 4)),
    levels=_LEVELS,
    settings=tuple((dict(CALM.settings) | {"retry_for": 8.0}).items()),
    faults=(
        ("crash primary", 1), ("freeze primary", 2), ("cut off primary", 2), ("hand over", 3), ("slow copies", 3),
        ("cut off copy", 1), ("freeze copy", 1), ("crash copy", 1), ("sentinel away", 2), ("sentinel alone", 1),
        ("made older", 1), ("rename", 1), ("crash replica", 1), ("lose messages", 1), ("freeze replica", 1),
    ),
)  # fmt: skip
SHAPES = {
    "calm": CALM, "lossy": LOSSY, "crashes": CRASHES, "restarts": RESTARTS, "full": FULL, "late": LATE, "sql": SQL,
    "hot": HOT, "maintained": MAINTAINED, "restored": RESTORED, "leases": LEASES, "events": EVENTS, "cluster": CLUSTER,
    "moved": MOVED, "failover": FAILOVER, "sentinel": SENTINEL, "all": ALL,
    "live": LIVE, "live failover": LIVE_FAILOVER, "live cluster": LIVE_CLUSTER,
    "inbox": INBOX, "work": WORK,
}  # fmt: skip
