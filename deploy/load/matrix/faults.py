"""Every fault by its name: what it does, where it can be, and what it may cost. Law: data, no logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.load.matrix import other_faults as other
from deploy.load.matrix import redis_faults as warm
from deploy.load.matrix.scene import Scene, clock_server, faketime, may_mount

Strike = Callable[[Scene], None]
_ALWAYS = ("--appendfsync", "always")
_RDB = ("--appendonly", "no", "--save", "1 1")
_NOTHING = ("--appendonly", "no")
_ALONE = {"single": "one server has no replica to fail over to"}
_SAME_EVERYWHERE = "this fault does not depend on how Redis is deployed: see single"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `prepare` is done a quarter into the run, `strike` at its half, and over when it returns.

    `failover`: a replica's copy goes on being used. `same_data`: the servers go on with what they had on their disks.
    `not_on`: topologies where it cannot be, and why. `unfit`: why it cannot be on this machine. `settings` are what the
    stores are opened with besides.
    """

    name: str
    strike: Strike
    prepare: Strike | None = None
    options: tuple[str, ...] = ()
    failover: bool = False
    same_data: bool = True
    not_on: Mapping[str, str] = field(default_factory=dict)
    unfit: Callable[[], str] = lambda: ""
    sql: str = "shared"
    clocks: bool = False
    levels: tuple[str, ...] = ()
    records: int = 2
    tasks: int = 1
    stretch: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """What happens, in a sentence."""
        return " ".join((self.strike.__doc__ or "").split())


def _no_clock_of_servers() -> str:
    if not faketime():
        return "libfaketime is not installed"
    return "" if clock_server() else "no server that libfaketime can serve: jemalloc does not start"


def _no_mount() -> str:
    return "" if may_mount() else "a small file system can only be mounted by root"


_BUS = {"cluster": "the cluster bus bypasses the proxies; primary-frozen is the nearest fault"}
_SQL_ONCE = {"sentinel": _SAME_EVERYWHERE, "cluster": _SAME_EVERYWHERE}
_ONE_CLOCK = {
    "sentinel": "a server's clock affects only its scripts: see single",
    "cluster": "a server's clock affects only its scripts: see single",
}

_SAME_AS_KILL = dict.fromkeys(
    ("single", "sentinel", "cluster"), "the same as redis-kill-always: confirmed writes are already fsynced"
)
_ONE_STORE = dict.fromkeys(("sentinel", "cluster"), "many callers on one store: see single")

FAULTS = (
    Fault("worker-kill", other.kill_worker, options=_ALWAYS),
    Fault("worker-stop", other.stop_worker),
    Fault("redis-kill-everysec", warm.kill_all),
    Fault("redis-kill-always", warm.kill_all, options=_ALWAYS),
    Fault("redis-kill-rdb", warm.kill_all, options=_RDB, same_data=False),
    Fault("redis-kill-nothing", warm.kill_all, options=_NOTHING, same_data=False),
    Fault("power-everysec", warm.lose_power, warm.begin_to_watch),
    # What was acknowledged is on the disk, so that there is nothing to cut back: no byte of it is younger.
    Fault("power-always", warm.kill_all, options=_ALWAYS, not_on=_SAME_AS_KILL),
    Fault("failover-lag-0", warm.replace_primary, failover=True, not_on=_ALONE),
    Fault("failover-lag-0.3", warm.replace_primary, warm.lag_of(0.3), failover=True, not_on=_ALONE),
    Fault("failover-lag-1", warm.replace_primary, warm.lag_of(1.0), failover=True, not_on=_ALONE),
    Fault("primary-frozen", warm.freeze_primary, failover=True, not_on=_ALONE),
    Fault("primary-partitioned", warm.partition_primary, failover=True, not_on=_ALONE | _BUS),
    Fault("primary-emptied", warm.empty_primary, same_data=False, not_on=_ALONE),
    Fault("replicaof-older", warm.follow_older, warm.copy_server, same_data=False, not_on={
        "sentinel": "the Sentinels undo a manual REPLICAOF", "cluster": "REPLICAOF is refused in cluster mode",
    }),
    Fault("older-aof", warm.restart_older, warm.copy_files, same_data=False),
    Fault("older-rdb", warm.restart_older, warm.save_and_copy, options=_NOTHING, same_data=False),
    Fault("flushall", warm.flush_all, same_data=False),
    Fault("eviction", warm.fill_memory),
    Fault("script-flush", warm.flush_scripts),
    Fault("sql-killed", other.kill_sql),
    Fault("sql-frozen", other.freeze_sql, not_on=_SQL_ONCE),
    Fault("sql-full", other.fill_disk, sql="small", unfit=_no_mount, not_on=_SQL_ONCE),
    # What neither has cannot come back; so that Redis has all, it keeps every message.
    Fault("sql-older", other.restore_sql, other.copy_sql, sql="own", settings={"recent_messages": 100_000}),
    Fault("net-dropped", other.drop_answers),
    Fault("net-dropped-threads", other.drop_and_disorder, levels=("memory",), records=3, tasks=3, stretch=3.0,
          not_on=_ONE_STORE),
    Fault("net-half-open", other.half_open),
    Fault("net-delay", other.delay_of(0.1)),
    Fault("clock-server", warm.jump_server_clocks, clocks=True, unfit=_no_clock_of_servers, not_on=_ONE_CLOCK),
    Fault("clock-workers", warm.jump_worker_clocks, not_on=_ONE_CLOCK),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
# Two at once: the worst that may meet.
PAIRS = (
    ("failover-lag-0.3", "sql-killed"),
    ("failover-lag-0.3", "worker-kill"),
    ("redis-kill-nothing", "worker-kill"),
    ("flushall", "sql-killed"),
    ("net-dropped", "sql-frozen"),
)
