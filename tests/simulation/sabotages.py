"""Proof that the simulator finds faults. Law: it finds the removal of each guard that this project once lacked.

A sabotage replaces a piece of a Lua script, or of the source of a Python function, during a run. The guard is replaced
by a call of `reached()`, which counts the cases in which the guard would have acted, and lets them pass: `if refused
then` becomes `if refused and reached() then`. A sabotage counts only if its guard was reached.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from distributed_state.cold import archive, erasure
from distributed_state.conversation import output as live_output
from distributed_state.conversation import turn
from distributed_state.hot import cache
from distributed_state.port import commands, identities, routing, topology
from distributed_state.records import restoring
from distributed_state.store import reaper, work
from distributed_state.tiers import archiver, commit, read, reconcile, recovery, unarchived
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm import client, confirming, lease, link, per_server
from tests.controls import sabotage
from tests.simulation import node
from tests.simulation.plan import SHAPES, Plan, Shape
from tests.simulation.run import Result, Run
from tests.simulation.world import EPOCH


class Reached:
    """Counts the cases in which a guard would have acted; called in place of the guard, it lets them pass."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bool:
        self.count += 1
        return False


@dataclass(frozen=True, slots=True)
class Lua:
    """A piece of a script, as sent with its includes, and its replacement."""

    script: str
    old: str
    new: str

    @contextmanager
    def broken(self, reached: Reached) -> Iterator[None]:
        """Inside, the broken script is sent to servers."""
        with mock.patch.dict(node.LUA_GLOBALS, reached=reached), sabotage(self.script, self.old, self.new):
            yield


@dataclass(frozen=True, slots=True)
class Python:
    """A piece of a function's source, and its replacement, wherever the function was imported."""

    function: Callable[..., Any]
    old: str
    new: str

    @contextmanager
    def broken(self, reached: Reached) -> Iterator[None]:
        """Inside, the function is broken."""
        function: Any = inspect.unwrap(self.function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{function.__qualname__} holds {self.old!r} {source.count(self.old)} times"
        tree = ast.parse(source.replace(self.old, self.new))
        (definition,) = tree.body
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
        definition.decorator_list = []
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        exec(compile(tree, inspect.getsourcefile(function) or "", "exec", flags, dont_inherit=True), made)
        kept = function.__code__
        with mock.patch.dict(function.__globals__, reached=reached):
            function.__code__ = made[function.__name__].__code__
            try:
                yield
            finally:
                function.__code__ = kept


@dataclass(frozen=True, slots=True)
class Sabotage:
    """A guard that is removed. `seed`: a run of the shape that finds the removal."""

    guards: Sequence[Lua | Python]
    shape: Shape
    seed: int

    def run(self, seed: int, reached: Reached) -> Result:
        """One run without the guard."""
        with ExitStack() as stack:
            for guard in self.guards:
                stack.enter_context(guard.broken(reached))
            return Run(Plan.of(seed, self.shape)).result()

    def control(self, seed: int) -> Result:
        """The same run with the guard."""
        return Run(Plan.of(seed, self.shape)).result()


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search for a run that finds a sabotage. `result`: of the last run; the counts: of all runs."""

    runs: int
    operations: int
    reached: int
    result: Result


def search(sabotaged: Sabotage, first: int, runs: int) -> Search:
    """Search the first seed that finds the sabotage: the run breaks a promise only without the guard."""
    reached, operations = Reached(), 0
    for seed in range(first, first + runs):
        result = sabotaged.run(seed, reached)
        operations += result.operations
        if result.broken:
            break
    return Search(seed - first + 1, operations, reached.count, result)


# The shapes for these sabotages: few operations in a short time, and many faults of the right kind.

_SLOW = (("warm_ttl", 0.5), ("partitions", 1), ("retry_for", 5.0), ("timeout", 1.0), ("archive_every", 1.0))
_FAST = (("warm_ttl", 0.3), ("partitions", 1), ("retry_for", 5.0), ("timeout", 1.0), ("archive_every", 0.02))


def _shape(kinds: str, faults: str = "", **more: Any) -> Shape:
    """A shape with many operations in a short time; operations and faults are given as in "turn 3, set if equal"."""

    def counts(text: str) -> tuple[tuple[str, int], ...]:
        parts = [part.strip().rpartition(" ") for part in text.split(",") if part.strip()]
        return tuple(
            (name, int(count)) if count.isdigit() else (f"{name} {count}".strip(), 1) for name, _, count in parts
        )

    given = {"replicas": 3, "clients": 6, "records": 1, "operations": 60, "pace": 0.03, "reads": 0.2, "cancelled": 0.0}
    return replace(Shape(), mix=counts(kinds), faults=counts(faults), **(given | {"settings": _FAST} | more))


_CLASH = _shape("set if unchanged, set if equal, transaction, apply")
_LEASED = _shape("turn 3, locked 3", "evict 20, freeze replica 8", ttl=0.3, pace=0.05, reads=0.05)
_LOCKED = _shape("locked 2, set 2, increment", ttl=1.0)
_KEPT = _shape("turn 2, locked", "forget scripts 10", ttl=1.0, pace=0.06)
_LOSSY = _shape("increment, append 3, set", "lose messages 8")
_EVICTED = _shape("increment, append, set", "evict 60", pace=0.1)
_DOUBTED = _shape("set 3, increment", "evict 99, lose messages 20, freeze replica 12, silence 6", pace=0.08, reads=0.1)
_RESTARTED = _shape("append 2, set, turn, transaction", "power cut 3, lose messages 2", operations=90, pace=0.15)
_DYING = _shape(
    "append, set 3, transaction 3", "power cut 3, crash replica 3", replicas=4, operations=90, pace=0.15, settings=_SLOW
)
_CUT = _shape("append, set, increment", "power cut 3, lose messages 6", operations=80, pace=0.1, settings=_SLOW)
_EMPTIED = _shape(
    "append, set, increment",
    "restart server 4, lose messages 6",
    operations=80,
    pace=0.1,
    persistence="none",
    settings=_SLOW,
)
_SILENT = _shape(
    "append, set, increment",
    "freeze replica 12, restart server 4",
    operations=80,
    pace=0.1,
    persistence="none",
    settings=_SLOW,
)
_FRESH = (*_FAST, ("max_staleness", 0.2))
_HOT = _shape("set 3, increment", reads=0.6, pace=0.1, settings=_FRESH)
_DEAF = _shape("set 3, increment", "silence 8, freeze server 3", reads=0.6, pace=0.15, settings=_FRESH)
_ARCHIVED = _shape("append, set, durable", "sql loses answers 4, sql away 4, evict 20", pace=0.1)
_LONG = (*_FAST[1:], ("warm_ttl", 60.0))
_SECRETS = _shape("keep secret 3, erase 2", settings=_LONG)
_CROWD = {"replicas": 2, "clients": 16, "reads": 0.0, "operations": 120, "settings": _FRESH}
_ASKING = _shape("read 8, get 2, set 3", "silence 12", pace=0.1, **_CROWD)
_LARGE = _shape("read 5, get 8, set large 2", "slow messages 4, drop subscribers 2", pace=0.2, **_CROWD)
_CONFIRMED = _shape(
    "durable 4, set 2, append",
    "power cut 4, restart server 2, freeze replica 4, lose messages 4",
    operations=90,
    pace=0.1,
    persistence=("always", "everysec"),
    settings=_SLOW,
)
_UNHEARD = _shape("transaction 6, set", "restart past a writer 12", operations=80, pace=0.5, reads=0.0, settings=_SLOW)
_HEARD = _shape("append, set, increment", "restart server 4, power cut 3", operations=80, pace=0.1, settings=_SLOW)
# Behind Sentinels.
_WATCHED: dict[str, Any] = {"copies": 2, "watched": (True,), "operations": 90, "pace": 0.1}
_WATCHED["settings"] = tuple((dict(_SLOW) | {"retry_for": 8.0}).items())
_REPLACED = _shape(
    "append, set, increment, turn, transaction", "hand over 6, slow copies 3, cut off primary 2", **_WATCHED
)
_REPLACED_TWICE = _shape(
    "append, set 2, increment", "hand over 8, cut off primary 3, crash primary 2, freeze primary 2", **_WATCHED
)
_OLDER = _shape("append, set 2, increment, transaction", "made older 6, slow copies 4", **_WATCHED)
_COPIED = _shape(
    "durable",
    "hand over 4, slow copies 4, cut off copy 3, cut off primary 6, freeze copy 2",
    levels=("replicated",),
    **(_WATCHED | {"replicas": 4, "clients": 8}),
)


def _lua(script: str, guard: str) -> Lua:
    """A script without a guard. The guard ends in `then`, `do`, or at the end of its line."""
    condition, _, rest = guard.rpartition(" then")
    return Lua(script, guard, f"{condition} and reached() then{rest}")


_HELD = Lua("commit", "if holder ~= lock_value then", "if holder ~= lock_value and reached() then")
_EPOCH = "if read_under ~= '' and read_under ~= epoch then return {'epoch', epoch} end\n"
_TOKEN = "math.max((redis.call('HGET', meta, 'token') or 0) + 1, now[1] * 1000000 + now[2])"

_NEVER_RESTARTED = Python(
    recovery.Recovery._is_same,
    "not server.former and await self._runs_since(node, place.proved_ms - _UPTIME_MS)",
    "True",
)
_NODES = {"primaries": (3,), "records": 6}
_SPREAD = (*_FAST[:1], ("partitions", 3), *_FAST[2:])
_MOVED_HOT = _shape(
    "set 3, increment", "move slot 20", reads=0.5, pace=0.05, operations=200,
    settings=(*_FRESH[:1], ("partitions", 6), *_FRESH[2:]), **_NODES,
)  # fmt: skip
_MOVED = _shape(
    "set 2, append, increment, turn", "move slot 8, old map 4", operations=80, pace=0.1,
    settings=(*_SLOW[:1], ("partitions", 6), *_SLOW[2:]), **_NODES,
)  # fmt: skip
_RESTARTED_NODES = _shape(
    "append 2, set, turn, transaction", "power cut 4, lose messages 2", operations=90, pace=0.15,
    settings=_SPREAD, **_NODES,
)  # fmt: skip
_MOVED_AND_LOST = SHAPES["moved"]
_LOCKED_AND_EVICTED = _shape(
    "locked 3, set 2", "evict 60, slow messages 8, silence 8", ttl=1.0, pace=0.08, operations=120
)
_ONE_OF_THREE = _shape(
    "turn 3, locked 3, set", "server stands still 2, server away 1", operations=80, pace=0.1, ttl=0.5,
    settings=(*_SLOW[:1], ("partitions", 6), *_SLOW[2:]), **_NODES,
)  # fmt: skip
_BATCHES = _shape(
    "batch 4, set", "lose messages 6, silence of a server 6", operations=80, pace=0.1,
    settings=(*_SLOW[:1], ("partitions", 6), *_SLOW[2:]), **_NODES,
)  # fmt: skip
_INPUTS = _shape("post 6, serve 4", operations=40, pace=0.1, reads=0.0, settings=SHAPES["inbox"].settings)
_INPUTS_ROLLED_BACK = _shape(
    "post 6, serve 4, roll back 3", operations=40, pace=0.1, reads=0.0, settings=SHAPES["inbox"].settings
)
_WORKED: dict[str, Any] = {"operations": 40, "pace": 0.1, "reads": 0.0, "works": True, "ttl": 1.0}
_WORKED["settings"] = SHAPES["work"].settings
_WORKING = _shape("post 4, wake 3, serve", "crash replica 2", **_WORKED)
_WORKING_ON = _shape("wake 6, post", "flush 4", **_WORKED, records=8)
_TAKING = _shape("post", "crash replica 6", **_WORKED, records=12)
_WAKES_ROLLED_BACK = _shape("post 2, wake 3, roll back 3", **_WORKED)
_STREAMS = "live 4, live alone 2, follow 6, stop 2"
_STREAMED: dict[str, Any] = {"operations": 48, "reads": 0.0, "pace": 0.1, "settings": SHAPES["live"].settings}
_STREAMING = _shape(_STREAMS, **_STREAMED)
_STREAMING_LOSSY = _shape(_STREAMS, "lose messages 10", **_STREAMED)
_STREAMING_FROZEN = _shape(
    "live 4, live alone 2, follow 6", "freeze replica 10, drop subscribers 20", ttl=0.6, **_STREAMED
)
_STREAMING_EVICTED = _shape(_STREAMS, "evict 40", **_STREAMED)
_STREAMING_CRASHES = _shape(_STREAMS, "crash replica 4, freeze replica 4", ttl=0.5, **_STREAMED)
_STREAMING_SET = _shape(_STREAMS, "clock jump 20", **_STREAMED)
_STREAMING_SERVER_SET = _shape(_STREAMS, "server clock jump 10", **_STREAMED)
SABOTAGES: dict[str, Sabotage] = {
    # Locks and turns
    "a lease that was lost still writes": Sabotage((_HELD,), _LEASED, 3),
    "a lock keeps nobody else out": Sabotage(
        (_lua("commit", "elseif holder and string.byte(holder) == 120 then"),), _LOCKED, 1
    ),
    "a lock goes to whoever asks, though it is held": Sabotage(
        (Lua("acquire", "if seized or not held and", "if seized or (not held or not reached()) and"),), _KEPT, 1
    ),
    "a lock is given back before the commit that it protects is applied": Sabotage(
        (
            Lua("release", "if not at then return {'kept'} end", "if not at then reached() at = 1 end"),
            Lua(
                "release",
                "' ' .. sequence .. ':', 1, true) then return {'kept'} end",
                "' ' .. sequence .. ':', 1, true) and reached() then return {'kept'} end",
            ),
        ),
        replace(_KEPT, settings=(*_FAST[1:], ("warm_ttl", 0.05))),
        1,
    ),
    "tokens begin anew with an epoch": Sabotage(
        (
            Lua("acquire", _TOKEN, "(redis.call('HGET', meta, 'token') or 0) + 1"),
            Lua("install", "'token', floor", "'token', reached() or '0'"),
        ),
        _shape("turn 3, locked", "power cut 3", operations=80, pace=0.15),
        3,
    ),
    "a renewal that the end of its turn overtook ends the turn as lost": Sabotage(
        (Python(lease.Renewal._renewed, "and lease.granted", "and (lease.granted or not reached())"),),
        _shape("turn 6, locked 3, increment, set", "freeze replica 6, silence 3", ttl=0.2),
        13,
    ),
    "a request that was answered is answered again": Sabotage(
        (Python(turn.AsyncTurn._look_for_answer, "if self._request is None", "if not reached()"),),
        _shape("turn", "lose messages 5"),
        1,
    ),
    "a lock is given back that somebody else holds by now": Sabotage(
        (_lua("release", "if held and string.sub(held, -#holder - 1) ~= ':' .. holder then"),),
        _shape("turn 3, locked 3", "freeze replica 6", ttl=1.0, pace=0.15, reads=0.0, operations=40),
        13,
    ),
    "a lock does not say which version its record has": Sabotage(
        (Python(Tiers._lock_granted, "self.hot.expect(text, taken.epoch, taken.version)", "reached()"),),
        _shape("locked 4, set, get 2, turn", reads=0.0),
        40,
    ),
    # Live turns
    "a batch of chunks is appended again, as batches have no numbers": Sabotage(
        (
            Lua(
                "output",
                "if number + 0 <= last then return {'duplicate'} end",
                "if number + 0 <= last and not reached() then number = format('%d', last + count) end",
            ),
        ),
        _STREAMING_LOSSY,
        1,
    ),
    "a commit does not end the output": Sabotage(
        (Lua("commit", "if ends_output then", "if ends_output and reached() then"),), _STREAMING, 2
    ),
    "the end of an output is written before the commit": Sabotage(
        (
            Python(
                turn.AsyncTurn._commit,
                "timed = timed._replace(ends_output=output.end_operation)",
                "reached() or await output.end()",
            ),
        ),
        _STREAMING,
        1,
    ),
    "a stop reaches whoever holds the lock by then": Sabotage(
        (
            Lua(
                "renew",
                "string.sub(asked, 1, #lock_value + 1) == lock_value .. '\\n'",
                "(string.sub(asked, 1, #lock_value + 1) == lock_value .. '\\n' or not reached())",
            ),
        ),
        replace(_STREAMING, ttl=0.2),
        1,
    ),
    "only the first acquire of a stopped waiter is refused": Sabotage(
        (
            Lua(
                "acquire",
                "elseif stopped == holder then",
                "elseif stopped == holder then\n      reached() redis.call('ZREM', wait, member)",
            ),
        ),
        _shape("live 6, stop 4", "lose messages 40", **_STREAMED),
        1,
    ),
    "a lease ends by a clock that may be set": Sabotage(
        (
            Python(
                lease.Renewal._ends,
                "if now >= lease.deadline:",
                f"if self._port.wall() - {EPOCH - 1000} >= lease.deadline + 1 and not reached():",
            ),
        ),
        _STREAMING_SET,
        1,
    ),
    "the token of a lease is the server's time, which may be set back": Sabotage(
        (Lua("acquire", _TOKEN, "(reached() or now[1] * 1000000 + now[2])"),), _STREAMING_SERVER_SET, 5
    ),
    "a holder that lost its lock still streams": Sabotage(
        (
            Lua(
                "output",
                "if holder ~= lock_value or not string.find(lock_value, '@' .. current .. ':', 1, true) then",
                "if holder ~= lock_value and reached() then",
            ),
        ),
        _STREAMING_FROZEN,
        16,
    ),
    "a follower does not ask who holds the lock": Sabotage(
        (
            Python(
                live_output.AsyncOutput._judge,
                "mine = self._tag is None or seen.tag == self._tag",
                "mine = self._tag is None or seen.tag == self._tag\n    if not reached(): return None",
            ),
        ),
        _STREAMING_CRASHES,
        1,
    ),
    "a turn is called abandoned, and nobody reads whether it was answered": Sabotage(
        (
            Python(
                live_output.AsyncOutput._answer,
                "return request_log.answer_to(",
                "return (lambda *_: reached() or None)(",
            ),
            Python(
                live_output.AsyncOutput._judge,
                "kept = request_log.answer_to(entry, self._tag)",
                "kept = reached() or None",
            ),
        ),
        _STREAMING_EVICTED,
        1,
    ),
    "a follower that comes back is shown a batch from its beginning": Sabotage(
        (
            Python(
                live_output.AsyncOutput._chunks,
                "if number > known.number and",
                "if (number > known.number or not reached()) and",
            ),
        ),
        _STREAMING,
        1,
    ),
    "nothing marks the chunks that are missing": Sabotage(
        (
            Python(
                live_output.AsyncOutput._chunks,
                "if entry.first > known.number + 1:",
                "if entry.first > known.number + 1 and reached():",
            ),
        ),
        _STREAMING_EVICTED,
        1,
    ),
    "the next attempt at a request is shown as if the earlier one went on": Sabotage(
        (
            Python(
                live_output.AsyncOutput._begin,
                'self._ready.append(Restarted(f"{token}-{number}"))',
                "reached()",
            ),
        ),
        _STREAMING_CRASHES,
        2,
    ),
    # Preconditions
    "what was read under an epoch that has ended is good enough": Sabotage(
        (Lua("commit", _EPOCH, _EPOCH.replace("then", "and (expected ~= (version or '0') or reached()) then")),),
        _UNHEARD,
        18,
    ),
    "the version that a write expects is not compared": Sabotage(
        (Lua("commit", "expected ~= (version or '0')", "expected ~= (version or '0') and reached()"),), _CLASH, 1
    ),
    "the value that a write expects is not compared": Sabotage(
        (
            Lua(
                "commit",
                "wanted ~= '+' and wanted ~= '+' .. stored",
                "wanted ~= '+' and wanted ~= '+' .. stored and reached()",
            ),
        ),
        _CLASH,
        3,
    ),
    "a deleted record is written as if it was there": Sabotage(
        (_lua("commit", "if head[3] and deleted == 'refuse' then"),),
        _shape("set 2, append, increment, delete record"),
        1,
    ),
    # Writes that are repeated
    "a write whose answer was lost is applied again": Sabotage((_lua("commit", "if at then"),), _LOSSY, 2),
    "the rest of a small record's op ids is not read": Sabotage(
        (Lua("commit", "if ops and #ops == 64 then", "if ops and #ops == 64 and reached() then"),),
        _shape("set, increment", "lose messages 8", replicas=4),
        4,
    ),
    "what another replica is still sending is forgotten": Sabotage(
        (Lua("commit", "elseif time * 1000 + window_ms >= now_ms - 1000 then", "elseif reached() then"),), _LOSSY, 2
    ),
    "a write that was applied is refused as its epoch has ended since": Sabotage(
        (
            Lua("commit", _EPOCH, ""),
            Lua(
                "commit",
                "epoch = current\n\n",
                f"epoch = current\n{_EPOCH.replace('then', 'and not reached() then')}\n",
            ),
        ),
        replace(
            SHAPES["restarts"],
            mix=(("turn", 3), ("transaction", 2), ("set if unchanged", 1)),
            faults=(("restart server", 4), ("power cut", 2), ("lose messages", 8)),
            reads=0.1,
        ),
        46,
    ),
    "what came back from SQL is said not to have been applied": Sabotage(
        (_lua("commit", "if since < hydrated then"),), _DOUBTED, 2
    ),
    "SQL is not asked for a write whose answer was lost": Sabotage(
        (Python(commit.applied, "if version else None", "if version and reached() else None"),), _DOUBTED, 1
    ),
    "a write in doubt says that it cannot have been applied before its record came back": Sabotage(
        (Python(read.hydrate, "and not op.doubted", "and (not op.doubted or not reached())"),), _DOUBTED, 1
    ),
    "an answer that was lost is not noted": Sabotage(
        (Python(client.OpIds.lost, "op.doubted = True", "reached()"),), _DOUBTED, 2
    ),
    "a record that came back from SQL is said to remember all its op ids": Sabotage(
        (Lua("hydrate", "redis.call('HSET', record, '#ops', '@' .. format('%d', now_ms) .. ';')", "reached()"),),
        _DOUBTED,
        2,
    ),
    "a write in doubt says that it cannot have been applied before it is sent again": Sabotage(
        (Python(client.OpIds.sending, "if not op.doubted:", "if not op.doubted or not reached():"),), _DOUBTED, 2
    ),
    "op ids that leave an archived record leave no word of it": Sabotage(
        (Lua("mark_archived", "'@' .. before .. ';'", "reached() or ''"),), _DOUBTED, 3
    ),
    # Records that leave Redis and come back
    "a record that was changed may be evicted before it is archived": Sabotage(
        (Lua("commit", "call('PERSIST', record)", "reached()"),), _EVICTED, 1
    ),
    "a record that is not archived whole is given a time to live": Sabotage(
        (
            Lua(
                "mark_archived",
                "if stored[1] - version == 0 then",
                "if stored[1] - version == 0 or not reached() then",
            ),
        ),
        replace(_EVICTED, pace=0.01),
        1,
    ),
    "a record that left Redis is begun anew": Sabotage(
        (_lua("commit", "call('GET', hydration) ~= creation) then"),), _EVICTED, 1
    ),
    "a name that was begun here is not noted": Sabotage(
        (
            Lua(
                "commit",
                "if is_new then call('HSET', meta, place, listed .. mark) end",
                "if is_new then reached() end",
            ),
        ),
        _shape("set, increment", "evict 30", records=12, replicas=4, pace=0.1),
        1,
    ),
    "what SQL had is put back over what was written since": Sabotage(
        (
            Lua("hydrate", "~= token then return {'lost'} end", "~= token and reached() then return {'lost'} end"),
            _lua("hydrate", "if redis.call('EXISTS', record) == 1 then"),
        ),
        _shape("set, increment, append", "evict 99", pace=0.06, reads=0.5),
        1,
    ),
    "SQL's word that there is no such record holds for as long as Redis holds none": Sabotage(
        (
            Python(
                read.hydrate,
                "cold.token != tiers.known_ids.get(text)",
                "cold.token != tiers.known_ids.get(text) and (text not in tiers.known_ids or reached())",
            ),
        ),
        _shape("set, increment, fork", "evict 60, sql away 4", records=20, reads=0.5, pace=0.2),
        1,
    ),
    "an item leaves the window before it is archived": Sabotage(
        (
            Lua("mark_archived", "if of + 0 > version or", "if of + 0 > version and reached() or"),
            Lua("mark_archived", "local window_items = 64", "local window_items = 0"),
        ),
        _shape("item put 4, item delete, item get 6", "evict 60, sql frozen 2", reads=0.0, pace=0.05),
        1,
    ),
    # Expiry, and recovery
    "a rollback leaves what is over as it was stored": Sabotage(
        (
            Python(
                restoring._restore,
                "present.all_stored.keys()",
                "(present.all_stored.keys() if reached() else present.fields.keys())",
            ),
        ),
        _shape("set brief 3, roll back 3, set 2", pace=0.15, reads=0.4),
        24,
    ),
    "a session is ended that was written since it was looked at": Sabotage(
        (Python(reaper.Reaper._end, "expected=version", "expected=reached() or None"),),
        _shape("write short", "slow messages 6", records=3, pace=0.4, reads=0.0, settings=(*_FAST, ("sweep", 0.05))),
        15,
    ),
    "a SQL that was restored is taken for one that goes on": Sabotage(
        (
            Python(
                recovery._sql_is_older,
                "and place.archived > cursor.offset",
                "and place.archived > cursor.offset and reached()",
            ),
        ),
        replace(SHAPES["restored"], operations=80),
        2,
    ),
    # Another data id
    "a commit is taken by a server with another data id": Sabotage(
        (_lua("commit", "if kept_data_id ~= data_id then"),), _RESTARTED, 9
    ),
    "nobody is asked what it remembers": Sabotage(
        (Python(unarchived.Gathering.gather, "if not wanted:", "if not wanted or not reached():"),), _HEARD, 7
    ),
    "what a silent writer remembers is not kept": Sabotage(
        (Python(unarchived.UnarchivedCommits._drop_closed, "await self.late(partition, epoch, late)", "reached()"),),
        _UNHEARD,
        1,
    ),
    "an answer under one epoch lets go of what is remembered of another": Sabotage(
        (
            Python(
                unarchived.UnarchivedCommits._append,
                "and first[1] == commit[1]:",
                "and (first[1] == commit[1] or not reached()):",
            ),
        ),
        _CUT,
        7,
    ),
    "what is archived under one epoch is let go of under another": Sabotage(
        (
            Python(
                unarchived.UnarchivedCommits.archived,
                "and kept[0][1] == epoch:",
                "and (kept[0][1] == epoch or not reached()):",
            ),
        ),
        _CUT,
        9,
    ),
    "a level is confirmed by a server that does not have the commit": Sabotage(
        (_lua("confirm", "if not here then"), _lua("confirm", "if current ~= epoch then")), _CONFIRMED, 5
    ),
    "another data id is taken for a new name of the same": Sabotage(
        (Python(recovery.Recovery._is_same, "return False", "return not reached()"),), _RESTARTED, 10
    ),
    "what SQL has newer stays in Redis as it was": Sabotage(
        (
            Python(
                recovery.Recovery._discard_newer,
                "unmatched if await self._discard(keys, token, seen, records)",
                "unmatched if reached() is False",
            ),
        ),
        _RESTARTED,
        10,
    ),
    "what was put back stays in Redis as it was": Sabotage(
        (
            Python(
                recovery.Recovery._restore_unarchived,
                "if not await self._discard(keys, token, seen, records)",
                "if reached()",
            ),
        ),
        _CUT,
        5,
    ),
    "what was put back stands for all of the history before it": Sabotage(
        (
            Python(recovery._mark, 'f"{token}.put-back"', "reached() or last.event"),
            Python(
                recovery.Recovery._restore_unarchived,
                "await self._partitions.renew_right(keys, token)",
                "not reached()",
            ),
        ),
        SHAPES["sentinel"],
        30071,
    ),
    "a partition starts on the journal of the epoch before": Sabotage(
        (Lua("install", "redis.call('DEL', journal)", "reached()"),), _RESTARTED, 1
    ),
    "names that SQL has are not noted as a partition starts": Sabotage(
        (Lua("install", "'names', epoch, unpack(ARGV, 9))", "'names', epoch, 'none', tostring(reached()))"),),
        _shape(
            "set, increment", "restart server 3, crash replica 2", records=8, replicas=4, pace=0.1, persistence="none"
        ),
        5,
    ),
    "a writer does not remember what it was acknowledged": Sabotage(
        (Python(commit._commit, "and unarchived.add(keys, op, answer)", "and not reached()"),), _CUT, 2
    ),
    "what a batch wrote is not remembered": Sabotage(
        (
            Python(
                commit._supply_and_resend,
                "not draft.kind or tiers.unarchived.add(keys, op, answer)",
                "not reached()",
            ),
        ),
        _shape("batch 3, set", "power cut 3", operations=80, pace=0.1, records=2),
        3,
    ),
    "a commit whose answer came with its repetition is not remembered": Sabotage(
        (Python(unarchived.UnarchivedCommits.add, "return False", "return not reached()"),), _CUT, 9
    ),
    "what goes on with a gap is put back": Sabotage(
        (
            Python(
                reconcile._Chains.add,
                "entry.version == head.version + 1 and",
                "(entry.version == head.version + 1 or not reached()) and",
            ),
        ),
        _DYING,
        2,
    ),
    # A replica that takes over
    "a promoted server goes on under the epoch of the former one": Sabotage(
        (_lua("commit", "if kept_data_id ~= data_id then current = nil end"),), _REPLACED, 1
    ),
    "a promoted server is taken for the former one under another name": Sabotage(
        (Python(identities.ServerIdentity.renames, "not self.former and", "(not self.former or not reached()) and"),),
        _OLDER,
        1,
    ),
    "a server that has older data on the same connections is written to": Sabotage(
        (
            Lua(
                "commit",
                "if not age or age > 20 or age < 0 then",
                "if (not age or age > 20 or age < 0) and reached() then",
            ),
        ),
        _OLDER,
        19,
    ),
    "a former primary that still runs hides what was lost": Sabotage(
        (
            Python(
                routing.Router.has_data_elsewhere, "if not self.is_cluster:", "if not self.is_cluster and reached():"
            ),
            _NEVER_RESTARTED,
        ),
        _REPLACED_TWICE,
        24,
    ),
    "what no replica has is said to be replicated": Sabotage(
        (
            Python(
                confirming.Replicated.reached,
                "if acknowledged >= needed else",
                "if acknowledged >= needed or not reached() else",
            ),
        ),
        _COPIED,
        7,
    ),
    "a server that does not have a commit says that it does": Sabotage(
        (_lua("confirm", "if current ~= epoch then return"), _lua("confirm", "if not here then return")), _COPIED, 21
    ),
    # Hot
    "a change that does not follow is merged into what is kept hot": Sabotage(
        (
            Python(
                cache.Hot.apply,
                "and version == entry.version + 1",
                "and (version == entry.version + 1 or not reached())",
            ),
        ),
        replace(_HOT, pace=0.01),
        2,
    ),
    "a link that is silent is believed": Sabotage(
        (
            Python(
                cache.Hot.get,
                "self.clock() >= entry.freshness.good_until",
                "self.clock() >= entry.freshness.good_until and (entry.freshness.over or reached())",
            ),
        ),
        SHAPES["hot"],
        5,
    ),
    "a writer's own change is not shown to it": Sabotage(
        (
            Python(
                commit._update_cached,
                "tiers.known_ids.add(text)",
                "tiers.known_ids.add(text)\n    if text in tiers.hot.entries and not reached(): return",
            ),
        ),
        SHAPES["hot"],
        1,
    ),
    "a fresh read joins one that began before": Sabotage(
        (Python(read._ask, "alone = fresh", "alone = fresh and not (text in hot._flights and not reached())"),),
        _ASKING,
        5,
    ),
    "a read is joined that is older than hot may be": Sabotage(
        (Python(cache.Hot.take_off, "each.began >= since", "(each.began >= since or not reached())"),), SHAPES["hot"], 6
    ),
    "what was overtaken on its way is kept hot": Sabotage(
        (Python(cache.Hot.land, "entry.version >= version or", "(entry.version >= version or not reached()) or"),),
        _LARGE,
        47,
    ),
    "another version is called the same": Sabotage(
        (
            Lua(
                "read",
                "redis.call('HGET', record, '#v') == version then",
                "(redis.call('HGET', record, '#v') == version or not reached()) then",
            ),
        ),
        _HOT,
        8,
    ),
    "the holder of a lock trusts its hot copy of a record that was evicted": Sabotage(
        (
            Python(
                Tiers._lock_granted,
                "self.hot.forget(text)",
                "reached() or self.hot.expect(text, taken.epoch, taken.version)",
            ),
        ),
        _LOCKED_AND_EVICTED,
        191,
    ),
    # The archive
    "the journal is trimmed before SQL has it": Sabotage(
        (
            Python(
                archiver.Archiver._archive,
                "await self._insert(passed)",
                "reached()\n    await self._mark_archived(passed.archived)\n    await self._insert(passed)",
            ),
        ),
        _ARCHIVED,
        1,
    ),
    "two archivers archive the same": Sabotage(
        (
            Python(
                archive._moved,
                "        if at.get(",
                "        if (batch.partition, batch.epoch) in at and not reached() or at.get(",
            ),
        ),
        _shape("append, durable 3, set", pace=0.02),
        3,
    ),
    "an erased record keeps rows in SQL": Sabotage(
        (
            Python(
                erasure.erase,
                "sql.execute(delete(table).where(sql.among(table.c.record, keys)))",
                "reached()",
            ),
        ),
        _SECRETS,
        1,
    ),
    "an erased record stays in Redis": Sabotage(
        (Lua("drop", "redis.call('DEL', record, hydration, items, output, stop)", "reached()"),),
        replace(_SECRETS, records=12),
        1,
    ),
    # Cluster
    "a subscription is kept at the node that its slot has left": Sabotage(
        (
            Python(
                link.NodeLink._take,
                'return self._gone(self.channels.ended, channel, "its slot has moved")',
                "reached()",
            ),
        ),
        _MOVED_HOT,
        3,
    ),
    "MOVED is followed, and nobody looks where the slots are": Sabotage(
        (
            Python(routing.Router._redirected, "self._topology.moved(int(slot), target, node)", "reached()"),
            Python(topology.Topology.doubt, "self.doubted = self.several or self.only is None", "reached()"),
        ),
        _MOVED,
        3,
    ),
    "keys on their way are taken for a cluster that is set up wrongly": Sabotage(
        (
            Python(
                commands.translate,
                'return WarmUnavailable(f"{place}: the keys',
                'return (reached() or ConfigurationError)(f"{place}: the keys',
            ),
        ),
        _MOVED,
        2,
    ),
    "the data id of any other node is taken for the one that a slot came from": Sabotage(
        (
            Python(
                routing.Router.has_data_elsewhere,
                "found or server.data_id == data_id",
                "found or server.data_id == data_id or not reached()",
            ),
            _NEVER_RESTARTED,
        ),
        _RESTARTED_NODES,
        7,
    ),
    "a node that lost what it had of a slot that moved there is taken for one that just got it": Sabotage(
        (replace(_NEVER_RESTARTED, new="not reached()"),), _MOVED_AND_LOST, 13
    ),
    "what came from a node that died while a slot left it is taken as it stands": Sabotage(
        (Python(recovery.Recovery._start, "if mixed:", "if mixed and reached():"),), _MOVED_AND_LOST, 75
    ),
    "keys of several moments are taken as they stand if meta does not say when they were last together": Sabotage(
        (
            Python(
                recovery.Recovery._is_mixed,
                'if elsewhere or not place.proved_ms or place.data_id in ("?", server.data_id):',
                'if (elsewhere or not place.proved_ms or place.data_id in ("?", server.data_id)) and reached():',
            ),
        ),
        _MOVED_AND_LOST,
        72,
    ),
    "the answers of one node are taken for those of all": Sabotage(
        (
            Python(
                routing.Router._exchange_routed,
                "part = found[node]",
                "from_others = [each for at, each in found.items() if not isinstance(each, WarmUnavailable)"
                " and len(sent[at]) == len(sent[node])]\n"
                "            part = found[node]\n"
                "            if isinstance(part, WarmUnavailable) and from_others and not reached():\n"
                "                part = from_others[0]",
            ),
        ),
        _BATCHES,
        1,
    ),
    "a lease waits for those on other nodes to be renewed": Sabotage(
        (
            Python(
                per_server.PerServer.hand,
                "node = self._port.node_of(key)",
                'node = "" if not reached() else ""',
            ),
        ),
        _ONE_OF_THREE,
        11,
    ),
    "a turn leaves what it took in the inbox": Sabotage(
        (Lua("commit", "  put('#b' .. number, '')", "  if reached() then put('#b' .. number, '') end"),),
        _INPUTS,
        1,
    ),
    "a request is accepted again while its input waits": Sabotage(
        (Lua("commit", "if posted then", "if posted and reached() then"),), _INPUTS, 1
    ),
    "a rollback brings served inputs back": Sabotage(
        (
            Python(
                restoring._restore,
                "if is_kept(name)}",
                "if is_kept(name) and (name[:2] != INBOX or reached())}",
            ),
        ),
        _INPUTS_ROLLED_BACK,
        1,
    ),
    "a turn that was taken over serves its inputs": Sabotage(
        (
            Lua(
                "commit",
                "if holder ~= lock_value then",
                "if holder ~= lock_value and (kind ~= 'turn' or reached()) then",
            ),
        ),
        _INPUTS,
        7,
    ),
    "a follower of an input follows the next turn that takes any": Sabotage(
        (
            Python(
                live_output.AsyncOutput._taken_at,
                "if self._posted in _tags(each)",
                "if self._posted in _tags(each) or (_tags(each) and not reached())",
            ),
        ),
        _INPUTS,
        1,
    ),
    "a commit does not make the session due": Sabotage(
        (Lua("commit", "elseif due_at then", "elseif due_at and reached() then"),), _WORKING, 1
    ),
    "a session that a worker took is not found again": Sabotage(
        (Lua("due", "now_ms + ahead_ms", "now_ms + ahead_ms * (reached() and 1 or 1000)"),), _TAKING, 1
    ),
    "a set of due sessions that Redis lost is not filled again": Sabotage(
        (Python(work.SessionWorker._look, "if filled_for != epoch:", "if filled_for != epoch and reached():"),),
        _WORKING_ON,
        5,
    ),
    "a turn that failed is not tried again": Sabotage(
        (Lua("commit", "wait == '!' and '!'", "(wait == '!' or not reached()) and '!'"),), _WORKING, 2
    ),
    "a rollback drops wakes": Sabotage(
        (
            Python(
                restoring._restore,
                "if is_kept(name)}",
                "if is_kept(name) and (name[:2] != INBOX or reached())}",
            ),
        ),
        _WAKES_ROLLED_BACK,
        1,
    ),
}
